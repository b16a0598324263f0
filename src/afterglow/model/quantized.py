"""Quantised checkpoints in safetensors: AWQ, GPTQ and compressed-tensors, 4 and 8 bits. Their matrices stay in groups of 32, or are
floats of 8 bits. Which method packed the weights, and whether it is one that is read here, says `quantization_config` in `config.json`.

A weight is scale * (number - zero), with a scale and a zero for each group of inputs. Methods differ in how numbers are packed
into words of 32 bits, lowest bits first:

- GPTQ: `qweight` [inputs / n, outputs], n neighbours in a word; `qzeros` [groups, outputs / n], one less than the zeros
  (`gptq_v2`: the zeros); `scales` [groups, outputs]; `g_idx` [inputs]: the group of each input.
- AWQ: `qweight` [inputs, outputs / 8] and `qzeros` [groups, outputs / 8]: outputs 0, 2, 4, 6, 1, 3, 5, 7 in a word.
- compressed-tensors: `weight_packed` [outputs, inputs / n], numbers plus 2^(bits - 1), or `weight` in int8; `weight_scale`
  [outputs, groups]; `weight_zero_point`, packed down the outputs, or in int8; `weight_g_idx`.
- Floats, of compressed-tensors and `fp8`: `weight` in e4m3, and `weight_scale` (or `weight_scale_inv`), one, [outputs] or [outputs, 1]. Rows are not rounded
  here, so that scales of activations do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from afterglow.errors import ModelError
from afterglow.kernels.device_blocks import FLOATS
from afterglow.kernels.device_products import FLOAT8
from afterglow.kernels.packed import GROUP, asymmetric_blocks
from afterglow.model.checkpoint import Checkpoint, UnpackedCheckpoint
from afterglow.model.tables import PackedTensor

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs in a word
DEQUANTISE = "--quantization none, int8 and int4 dequantise it"
SCALES = (
    ".weight_scale",
    ".weight_scale_inv",
)  # the latter is transformers' name: numbers are multiplied by it too
KEYS = ("quantization_config", "compression_config")
SUPPORTED = "awq, gptq and compressed-tensors, with weights of 4 or 8 bits, fp8, and mxfp4 of gpt-oss"
REMEDY = "use the checkpoint that it was quantised from; --quantization int4 or int8 rounds it here"


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


class FloatMatrix(NamedTuple):
    """Weights number * scale [outputs, inputs], numbers of 8 bits."""

    numbers: Tensor  # float8_e4m3fn [outputs, inputs]
    scale: Tensor  # float32 [outputs, 1]

    def dequantized(self) -> Tensor:
        """Return the weights, float32 [outputs, inputs]."""
        return self.numbers.float() * self.scale

    def packed(self, name: str) -> PackedTensor:
        """Return each row's scale, and its numbers behind it."""
        return PackedTensor(torch.cat([part.view(torch.uint8) for part in (self.scale, self.numbers)], 1), FLOATS)


Result = TypeVar("Result")
Unpack = Callable[[Checkpoint, str, tuple[int, int]], QuantizedMatrix | FloatMatrix]


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


def gptq(files: Checkpoint, module: str, shape: tuple[int, int], *, less: int = 1) -> QuantizedMatrix:
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


def gptq_v2(files: Checkpoint, module: str, shape: tuple[int, int]) -> QuantizedMatrix:
    """Unpack a matrix of GPTQ whose zeros are stored as they are."""
    return gptq(files, module, shape, less=0)


def awq(files: Checkpoint, module: str, shape: tuple[int, int]) -> QuantizedMatrix:
    """Unpack a matrix of AWQ (gemm)."""
    outputs, inputs = shape
    words = _shaped(module + ".qweight", files.read(module + ".qweight"), inputs, outputs // 8)
    numbers, zero = (fields(part, 4)[..., AWQ_PLACES].flatten(1).T for part in (words, files.read(module + ".qzeros")))
    scale = files.read(module + ".scales").float().T.contiguous()
    _shaped(module + ".qzeros, unpacked and transposed,", zero, outputs, scale.shape[1])
    return QuantizedMatrix(numbers.contiguous(), scale, zero.short(), 4)


def compressed(files: Checkpoint, module: str, shape: tuple[int, int]) -> QuantizedMatrix:
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


def float8(files: Checkpoint, module: str, shape: tuple[int, int]) -> FloatMatrix:
    """Unpack a matrix of floats of 8 bits. Raises: ModelError."""
    name = next((module + mark for mark in SCALES if files.has(module + mark)), None)
    if name is None:
        raise ModelError(
            f"{module}: there is no scale of its floats of 8 bits ({', '.join(SCALES)}); download the model again"
        )
    scale = files.read(name).float()
    scale = (scale if scale.dim() == 2 else scale.reshape(-1, 1)).expand(shape[0], 1).contiguous()
    numbers = _shaped(module + ".weight", files.read(module + ".weight"), *shape)
    if numbers.dtype != FLOAT8:
        raise ModelError(f"{module}.weight has dtype {numbers.dtype}, expected is {FLOAT8}")
    return FloatMatrix(numbers, scale)


def unpacking(config: Mapping[str, Any]) -> Unpack | None:
    """Return how to unpack the matrices of a checkpoint; None if it is not quantised, or in blocks (`stacked_experts`).

    Raises: ModelError, with the method, for one that is not read.
    """
    about = next((config[key] for key in KEYS if config.get(key) is not None), None)
    if about is None:
        return None
    method = about.get("quant_method") if isinstance(about, Mapping) else None
    if method == "gptq":
        _check(method, "bits", about.get("bits"), (4, 8))
        _check(
            method,
            "checkpoint_format",
            about.get("checkpoint_format") or about.get("format") or "gptq",
            ("gptq", "gptq_v2"),
        )
        return gptq_v2 if "gptq_v2" in (about.get("checkpoint_format"), about.get("format")) else gptq
    if method == "awq":
        _check(method, "bits", about.get("bits", about.get("w_bit")), (4,))
        _check(method, "version", str(about.get("version") or about.get("format") or "gemm").lower(), ("gemm",))
        return awq
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        return None
    if method == "fp8":
        _check(method, "weight_block_size", about.get("weight_block_size"), (None,))
        _check(method, "fmt", about.get("fmt", "e4m3"), ("e4m3",))
        return float8
    if method == "compressed-tensors":
        return float8 if _check_compressed(about) == "float" else compressed
    raise ModelError(
        f"quantised weights of the method {method!r} are not supported (quantization_config in config.json; supported are "
        f"{SUPPORTED}); {REMEDY}"
    )


def _check(method: str, key: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ModelError(
            f"quantised weights of the method {method!r} with {key} = {value!r} are not supported (supported: "
            f"{', '.join(map(str, known))}); {REMEDY}"
        )


def _check_compressed(about: Mapping[str, Any]) -> str:
    """Return the type of the weights, int or float."""
    method = "compressed-tensors"
    groups = [group for group in (about.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    groups = groups or [{}]
    weights_of = str((groups[0].get("weights") or {}).get("type", "int"))
    floats = weights_of == "float"
    formats = ("float-quantized",) if floats else ("pack-quantized", "int-quantized")
    for group in groups:
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        _check(method, "format", group.get("format") or about.get("format"), (*formats, "naive-quantized"))
        _check(method, "type of weights", weights.get("type", "int"), ("float",) if floats else ("int",))
        _check(method, "num_bits of weights", weights.get("num_bits"), (8,) if floats else (4, 8))
        strategies = ("channel", "tensor") if floats else ("group", "channel", "tensor")
        _check(method, "strategy of weights", weights.get("strategy"), strategies)
        if inputs is not None and not floats:  # rows are rounded to 8 bits here in any case, by a scale of their own
            kind = (inputs.get("type", "int"), inputs.get("num_bits"), inputs.get("dynamic"))
            _check(method, "input_activations (type, num_bits, dynamic)", kind, (("int", 8, True),))
        _check(method, "output_activations", group.get("output_activations"), (None,))
    _check(method, "sparsity", (about.get("sparsity_config") or {}).get("format", "dense"), ("dense",))
    _check(method, "transform_config", about.get("transform_config") or None, (None,))
    return weights_of


class QuantizedWeights(UnpackedCheckpoint):
    """A source of weights over a quantised checkpoint. Modules that are not quantised are read as they are."""

    in_blocks = True

    def __init__(self, files: Checkpoint, unpack: Unpack) -> None:
        """Read `files`, whose quantised matrices `unpack` unpacks."""
        super().__init__(files)
        self._unpack = unpack
        self.floats = unpack is float8  # of 8 bits, which not all devices have

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor, dequantised if need be: see `WeightSource`."""
        module = self._quantized(name)
        return (
            self._files.get(name, shape)
            if module is None
            else self._unpacked(module, _pair(shape), lambda matrix: matrix.dequantized())
        )

    def packed(self, name: str, shape: tuple[int, int]) -> PackedTensor | None:
        """Return a matrix in blocks: see `WeightSource`."""
        module = self._quantized(name)
        return None if module is None else self._unpacked(module, shape, lambda matrix: matrix.packed(module))

    def unpacks(self, name: str) -> bool:
        """Return whether a weight is quantised: see `UnpackingSource`."""
        return self._quantized(name) is not None

    def _unpacked(
        self, module: str, shape: tuple[int, int], use: Callable[[QuantizedMatrix | FloatMatrix], Result]
    ) -> Result:
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
        marks = (".qweight", *SCALES)
        return module if kind == "weight" and any(self._files.has(module + mark) for mark in marks) else None


def _pair(shape: tuple[int, ...]) -> tuple[int, int]:
    outputs, inputs = shape
    return outputs, inputs
