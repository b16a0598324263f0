"""Quantised checkpoints in safetensors: AWQ, GPTQ and compressed-tensors, 4 and 8 bits. Their matrices stay in groups of 32.

A weight is scale * (number - zero), with a scale and a zero for each group of inputs. Methods differ in how numbers are packed
into words of 32 bits, lowest bits first:

- GPTQ: `qweight` [inputs / n, outputs], n neighbours in a word; `qzeros` [groups, outputs / n], one less than the zeros
  (`gptq_v2`: the zeros); `scales` [groups, outputs]; `g_idx` [inputs]: the group of each input.
- AWQ: `qweight` [inputs, outputs / 8] and `qzeros` [groups, outputs / 8]: outputs 0, 2, 4, 6, 1, 3, 5, 7 in a word.
- compressed-tensors: `weight_packed` [outputs, inputs / n], numbers plus 2^(bits - 1), or `weight` in int8; `weight_scale`
  [outputs, groups]; `weight_zero_point`, packed down the outputs, or in int8; `weight_g_idx`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from afterglow.errors import ModelError
from afterglow.kernels.packed import GROUP, asymmetric_blocks
from afterglow.model.tables import PackedTensor

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs in a word
DEQUANTISE = "--quantization none, int8 and int4 dequantise it"


class Files(Protocol):
    """The tensors of a checkpoint by name."""

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is. Raises: ModelError if it is missing."""
        ...

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of floats: see `WeightSource`."""
        ...

    def dtype_of(self, name: str) -> str:
        """Return the dtype of a tensor of floats. Raises: ModelError if it is not such a one."""
        ...

    def __exit__(self, *exc: object) -> None: ...


class QuantizedMatrix(NamedTuple):
    """Weights scale * (number - zero) [outputs, inputs]; neighbouring inputs share a group, in the order of `order`."""

    numbers: Tensor  # uint8 [outputs, inputs]
    scale: Tensor  # float32 [outputs, groups]
    zero: Tensor  # int16, as scale
    bits: int
    order: Tensor | None = None  # int64 [inputs]: the input at each place, None if they are in their own order

    def dequantized(self) -> Tensor:
        """Return the weights, float32 [outputs, inputs], inputs in their own order."""
        outputs, groups = self.scale.shape
        numbers = self.numbers.view(outputs, groups, -1) - self.zero[..., None]
        weights = (numbers * self.scale[..., None]).flatten(1)
        return weights if self.order is None else weights[:, self.order.argsort()]

    def packed(self, name: str) -> PackedTensor:
        """Return the blocks of groups of 32. Raises: ModelError, with `name`, if groups are no whole blocks."""
        inputs, groups = self.numbers.shape[1], self.scale.shape[1]
        if inputs % groups or inputs // groups % GROUP:
            raise ModelError(f"{name}: groups of {inputs / groups:g} inputs are no multiple of {GROUP}; {DEQUANTISE}")
        if self.zero.max() > 255:
            raise ModelError(f"{name}: a zero point of {int(self.zero.max())} does not fit into 8 bits; {DEQUANTISE}")
        times = inputs // groups // GROUP
        scale, zero = (part.repeat_interleave(times, 1) for part in (self.scale, self.zero.to(torch.uint8)))
        return PackedTensor(asymmetric_blocks(self.numbers, scale, zero, self.bits), f"A{self.bits}", self.order)


Result = TypeVar("Result")
Unpack = Callable[[Files, str, tuple[int, int]], QuantizedMatrix]


def fields(words: Tensor, bits: int) -> Tensor:
    """Split int32 words [..., n] into numbers of 4 or 8 bits, lowest first: uint8 [..., n, 32 / bits]."""
    parts = words.contiguous()[..., None].view(torch.uint8)
    return parts if bits == 8 else torch.stack((parts & 15, parts >> 4), -1).flatten(-2)


def _bits(name: str, words: int, numbers: int) -> int:
    bits = 32 * words // numbers
    if bits not in (4, 8) or words * 32 != numbers * bits:
        raise ModelError(
            f"{name}: {numbers} numbers in {words} words have {32 * words / numbers:g} bits; supported are 4 and 8"
        )
    return bits


def _shaped(name: str, tensor: Tensor, *shape: int) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ModelError(f"{name} has shape {tuple(tensor.shape)}, expected is {shape}")
    return tensor


def _order(name: str, groups_of: Tensor, groups: int) -> Tensor | None:
    """Return the inputs sorted by their group; None if they are. Raises: ModelError if groups are not of one size."""
    groups_of = groups_of.long()
    inputs = len(groups_of)
    if (
        groups_of.min() < 0
        or groups_of.max() >= groups
        or not (groups_of.bincount(minlength=groups) * groups == inputs).all()
    ):
        raise ModelError(
            f"{name}: activation order with groups of different sizes is not supported; use a checkpoint without"
        )
    order = groups_of.argsort(stable=True)
    return None if torch.equal(order, torch.arange(inputs)) else order


def gptq(files: Files, module: str, shape: tuple[int, int], *, less: int = 1) -> QuantizedMatrix:
    """Unpack a matrix of GPTQ; `less`: what was subtracted from its zeros."""
    outputs, inputs = shape
    words = files.read(module + ".qweight")
    bits = _bits(module + ".qweight", words.shape[0], inputs)
    numbers = fields(_shaped(module + ".qweight", words, inputs * bits // 32, outputs), bits).transpose(0, 1).flatten(1)
    scale = files.read(module + ".scales").float().T.contiguous()
    groups = scale.shape[1]
    zero = fields(files.read(module + ".qzeros"), bits).flatten(1)[:, :outputs].T.short() + less
    _shaped(module + ".qzeros, unpacked and transposed,", zero, outputs, groups)
    order = None
    if files.has(module + ".g_idx"):
        order = _order(module, _shaped(module + ".g_idx", files.read(module + ".g_idx"), inputs), groups)
        numbers = numbers if order is None else numbers[:, order]
    return QuantizedMatrix(numbers, scale, zero, bits, order)


def gptq_v2(files: Files, module: str, shape: tuple[int, int]) -> QuantizedMatrix:
    """Unpack a matrix of GPTQ whose zeros are stored as they are."""
    return gptq(files, module, shape, less=0)


def awq(files: Files, module: str, shape: tuple[int, int]) -> QuantizedMatrix:
    """Unpack a matrix of AWQ (gemm)."""
    outputs, inputs = shape
    words = _shaped(module + ".qweight", files.read(module + ".qweight"), inputs, outputs // 8)
    numbers, zero = (fields(part, 4)[..., AWQ_PLACES].flatten(1).T for part in (words, files.read(module + ".qzeros")))
    scale = files.read(module + ".scales").float().T.contiguous()
    _shaped(module + ".qzeros, unpacked and transposed,", zero, outputs, scale.shape[1])
    return QuantizedMatrix(numbers.contiguous(), scale, zero.short(), 4)


def compressed(files: Files, module: str, shape: tuple[int, int]) -> QuantizedMatrix:
    """Unpack a matrix of compressed-tensors, packed or in int8."""
    outputs, inputs = shape
    scale = files.read(module + ".weight_scale").float()
    scale = (scale if scale.dim() == 2 else scale.reshape(-1, 1)).expand(outputs, -1).contiguous()
    if files.has(module + ".weight_packed"):
        words = files.read(module + ".weight_packed")
        bits = _bits(module + ".weight_packed", words.shape[1], inputs)
        numbers = fields(_shaped(module + ".weight_packed", words, outputs, inputs * bits // 32), bits).flatten(1)
    else:
        bits, whole = 8, _shaped(module + ".weight", files.read(module + ".weight"), outputs, inputs)
        numbers = whole.view(torch.uint8) ^ 128
    zero = torch.full(scale.shape, 1 << bits - 1, dtype=torch.int16)
    if files.has(module + ".weight_zero_point"):
        stored = files.read(module + ".weight_zero_point")
        if stored.dtype == torch.int32 and stored.shape[0] != outputs:
            zero = fields(stored.T, bits).flatten(1)[:, :outputs].T.short()
        else:
            zero = zero + stored.short().reshape(-1, scale.shape[1])
        _shaped(module + ".weight_zero_point, unpacked,", zero, *scale.shape)
    order = None
    if files.has(module + ".weight_g_idx") and (groups_of := files.read(module + ".weight_g_idx")).min() >= 0:
        order = _order(module, _shaped(module + ".weight_g_idx", groups_of, inputs), scale.shape[1])
        numbers = numbers if order is None else numbers[:, order]
    return QuantizedMatrix(numbers, scale, zero, bits, order)


class QuantizedWeights:
    """A source of weights over a quantised checkpoint. Modules that are not quantised are read as they are."""

    def __init__(self, files: Files, unpack: Unpack) -> None:
        """Read `files`, whose quantised matrices `unpack` unpacks."""
        self._files, self._unpack = files, unpack

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.__exit__(*exc)

    def dtype_of(self, name: str) -> str:
        """Return the dtype of a tensor that is not quantised. Raises: ModelError."""
        return self._files.dtype_of(name)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor, dequantised if need be: see `WeightSource`."""
        module = self._quantized(name)
        return (
            self._files.get(name, shape)
            if module is None
            else self._unpacked(module, _pair(shape), QuantizedMatrix.dequantized)
        )

    def packed(self, name: str, shape: tuple[int, int]) -> PackedTensor | None:
        """Return a matrix in blocks: see `WeightSource`."""
        module = self._quantized(name)
        return None if module is None else self._unpacked(module, shape, lambda matrix: matrix.packed(module))

    def _unpacked(self, module: str, shape: tuple[int, int], use: Callable[[QuantizedMatrix], Result]) -> Result:
        try:
            return use(self._unpack(self._files, module, shape))
        except (ArithmeticError, IndexError, RuntimeError, ValueError) as error:  # torch's, of shapes and dtypes
            if isinstance(error, ModelError):
                raise
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelError(f"{module}: its tensors make no quantised matrix ({reason}); download it again") from None

    def _quantized(self, name: str) -> str | None:
        """Return the module of a weight if it is quantised."""
        module, _, kind = name.rpartition(".")
        marks = (".qweight", ".weight_scale")
        return module if kind == "weight" and any(self._files.has(module + mark) for mark in marks) else None


def _pair(shape: tuple[int, ...]) -> tuple[int, int]:
    outputs, inputs = shape
    return outputs, inputs
