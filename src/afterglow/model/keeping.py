"""The way to keep each matrix of a model: chosen by what works on this machine, by short trials, and by `--quantization`."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from afterglow.choices import KeptWeights, QuantizationName
from afterglow.config import format_size
from afterglow.errors import ConfigError
from afterglow.kernels.block_rounding import round_to_blocks
from afterglow.kernels.built import native
from afterglow.kernels.device_blocks import device_matrix
from afterglow.kernels.device_products import RoundedFilling, RoundedMatrix
from afterglow.kernels.matrix import has_bytes, on_huge_pages
from afterglow.kernels.packed import BLOCK_FORMATS, GROUP, joined
from afterglow.model.linear import (
    BlockLinear,
    BytePanelLinear,
    Filling,
    Int8Linear,
    Linear,
    PackedLinear,
    PanelLinear,
    PlainLinear,
    ReorderedLinear,
    can_pack,
    int8_levels,
)
from afterglow.model.tables import BlockTable, DeviceTable, PackedTensor, PlainTable, Table

log = logging.getLogger("afterglow.model")

# How a device keeps weights that are rounded here: they alone are, and not what they are multiplied with.
ALONE: dict[QuantizationName, KeptWeights] = {
    "int8": "int8 alone", "int4": "int4 alone", "float8": "float8 alone"
}  # fmt: skip
FLOAT8_FROM = (8, 9)  # the least compute capability
TRIAL_ROWS = (1, 16, 128)  # decoding one request, several, and a prefill
TRIAL_OUTPUTS = 1024  # of a matrix are enough to try
WORTH = 1.3  # what comes later in the list has to be so much faster: the choice must not hang on noise, nor layers fall apart
FORMAT, HEAD_FORMAT = "Q4_0", "Q8_0"  # of weights that are rounded to 4 bits; of embedding and head beside them

Kind: TypeAlias = Callable[[Tensor, Tensor | None], Linear]


class WholeFilling:
    """A matrix that is put together as it is, then handed to the way to keep it."""

    def __init__(self, kind: Kind, weight: Tensor) -> None:
        """Fill `weight` [outputs, inputs], in the dtype and on the device that computes."""
        self._kind, self._weight = kind, weight

    def fill(self, start: int, weight: Tensor) -> None:
        """See `Filling`."""
        self._weight[start : start + weight.shape[0]].copy_(weight)

    def done(self, bias: Tensor | None) -> Linear:
        """See `Filling`."""
        return self._kind(self._weight, None if bias is None else bias.to(self._weight))


class BlockFilling:
    """A matrix whose parts are rounded to blocks."""

    def __init__(self, outputs: int, inputs: int, block_format: str) -> None:
        """Make room for the blocks, of the format Q4_0 or Q8_0."""
        self._format, self._inputs = block_format, inputs
        # Mapped apart, so that no hole stays between matrices when it is freed.
        self._blocks = on_huge_pages(torch.uint8, outputs, BLOCK_FORMATS[block_format].row_bytes(inputs))

    def fill(self, start: int, weight: Tensor) -> None:
        """See `Filling`."""
        round_to_blocks(weight, self._format, self._blocks[start : start + weight.shape[0]])

    def done(self, bias: Tensor | None) -> Linear:
        """See `Filling`."""
        return BlockLinear(self._blocks, self._format, self._inputs, bias)


class Keeping:
    """A way to keep the matrices of a model that computes in one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, quantization: QuantizationName = "none") -> None:
        """Choose among the ways that work here. Raises: ConfigError if the model cannot be quantised so."""
        self._dtype, self._device = dtype, device
        if quantization == "float8":
            check_float8(device)
        self._blocks, self._floats = quantization == "int4", quantization == "float8"
        self._on_device = device.type == "cuda" and quantization in ALONE
        self.kept = kept_as(quantization, device)
        self._in_blocks: Counter[str] = Counter()  # bytes on a device, by format
        self._weights = 0  # in these
        if quantization in ("int8", "int4") and not (self._on_device or blocks_work(dtype, device)):
            raise ConfigError(
                f"--quantization {quantization} computes on CPU in float32, not on {device.type} in "
                f"{str(dtype).removeprefix('torch.')}; use --device cpu --dtype float32, or --quantization none"
            )
        rounds = quantization == "int8" and not self._on_device
        self._kinds = _int8_kinds(quantization) if rounds else _float_kinds(dtype, device)

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Keep a whole matrix."""
        matrix = self.begin(*weight.shape)
        matrix.fill(0, weight)
        return matrix.done(bias)

    def begin(self, outputs: int, inputs: int, *, head: bool = False) -> Filling:
        """Begin an empty matrix. `head`: it yields logits, and keeps 8 bits where others get 4."""
        grouped = self._blocks and inputs % GROUP == 0
        if self._on_device:
            bits = 4 if grouped and not head else 8
            return RoundedFilling(outputs, inputs, self._device, bits, grouped=grouped, floats=self._floats)
        if grouped:
            return BlockFilling(outputs, inputs, HEAD_FORMAT if head else FORMAT)
        kinds = _int8_kinds("int4") if self._blocks else self._kinds
        kind = _fastest(kinds, min(outputs, TRIAL_OUTPUTS), inputs, torch.get_num_threads())
        if kind is BytePanelLinear:
            return BytePanelLinear.empty(outputs, inputs)
        if kind is _int8:
            return Int8Linear.empty(outputs, inputs)
        return WholeFilling(kind, torch.empty(outputs, inputs, dtype=self._dtype, device=self._device))

    def table(self, weight: Tensor) -> Table:
        """Keep an embedding table, [rows, width], in 8 bits beside matrices of 4, else `narrow`."""
        if self._blocks and weight.shape[1] % GROUP == 0:
            return self.block_table(round_to_blocks(weight.cpu(), HEAD_FORMAT), HEAD_FORMAT)
        return PlainTable(self.narrow(weight))

    def block_table(self, blocks: Tensor, block_format: str) -> Table:
        """Keep an embedding table in blocks, uint8 [rows, bytes of a row], which are not copied on CPU."""
        if self._device.type == "cpu":
            return BlockTable(blocks, block_format)
        about = BLOCK_FORMATS[block_format]
        tensor = PackedTensor(blocks, block_format)
        return DeviceTable(self._to_device(tensor, blocks.shape[1] // about.num_bytes * about.weights, None))

    def blocks(self, parts: Sequence[PackedTensor], inputs: int, bias: Tensor | None, order: Tensor | None) -> Linear:
        """Keep a matrix in the blocks that a file has; nothing is rounded again. `parts`, of one layout, lie one below the other; the
        matrix has their rows in `order`, int64 [outputs], or as they are."""
        matrix: Linear
        blocks, first = [part.blocks for part in parts], parts[0]
        if self._device.type == "cpu":
            matrix = BlockLinear(blocks, first.block_format, inputs, bias, order)
        else:
            matrix = self._to_device(first._replace(blocks=joined(blocks, order)), inputs, bias)
        return matrix if first.order is None else ReorderedLinear(matrix, first.order.to(self._device))

    def _to_device(self, tensor: PackedTensor, inputs: int, bias: Tensor | None) -> RoundedMatrix:
        matrix = device_matrix(tensor.blocks, tensor.block_format, inputs, self._device, bias)
        self._in_blocks[tensor.block_format] += matrix.num_bytes
        self._weights += matrix.outputs * inputs
        return matrix

    def say_memory(self) -> None:
        """Write to the log what matrices in blocks take on a device, where files have other sizes."""
        if self._in_blocks and not self._on_device:
            each = ", ".join(f"{kind} {format_size(size)}" for kind, size in sorted(self._in_blocks.items()))
            total = sum(self._in_blocks.values())
            log.info(
                "weights in blocks take %s on %s (%s), %.2f bits for each; as %s they would take %s",
                *(format_size(total), self._device, each, 8 * total / self._weights),
                *(str(self._dtype).removeprefix("torch."), format_size(self._weights * self._dtype.itemsize)),
            )

    def narrow(self, weight: Tensor) -> Tensor:
        """Return a copy of rows that will be looked up, on the device that computes: in their own dtype if the arithmetic is in
        float32, since widening them then is exact."""
        # NOTE: a checkpoint's tensors may be views of a mapped file, which another program may overwrite.
        return weight.to(self._device, weight.dtype if self._dtype == torch.float32 else self._dtype, copy=True)

    def tied(self, table: Table, bias: Tensor | None) -> Linear:
        """Keep a head whose weights are those of `table`. Lookups need plain rows, so this is a second copy of that matrix. It
        is the largest of all and read at every token: reordered, 768 x 32000 times one row takes 4.1 ms instead of 6.8."""
        if isinstance(table, DeviceTable):
            return table.matrix.with_bias(bias)
        if isinstance(table, BlockTable):
            return BlockLinear(table.blocks, table.block_format, table.width, bias)
        assert isinstance(table, PlainTable)
        return self(table.weight, bias)


def unrounded(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Keep a small matrix in floats: in panels where they work, since the calls of whole layers take no others."""
    kind = _float_kinds(weight.dtype, weight.device)[0]
    return PanelLinear(weight, bias) if kind is PanelLinear else PlainLinear(weight.clone(), bias)


def kept_as(quantization: QuantizationName, device: torch.device) -> KeptWeights:
    """Return what names the arithmetic of a model whose matrices are kept so, where no file says how."""
    if quantization == "auto" or quantization == "none":
        return "none"
    if device.type == "cuda" or quantization == "float8":
        return ALONE[quantization]
    return quantization


def has_float8(device: torch.device) -> bool:
    """Return whether a device computes with floats of 8 bits."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLOAT8_FROM


def check_float8(device: torch.device) -> None:
    """Refuse a device that does not compute with floats of 8 bits. Raises: ConfigError."""
    if has_float8(device):
        return
    has = (
        "a CPU" if device.type != "cuda" else "{} with {}.{}".format(device, *torch.cuda.get_device_capability(device))
    )
    raise ConfigError(
        f"--quantization float8 needs a CUDA device of compute capability {FLOAT8_FROM[0]}.{FLOAT8_FROM[1]} or more, not {has}; "
        "use --quantization int8"
    )


def blocks_work(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a model that computes so can have weights of few bits, and the rows beside them in 8."""
    return device.type == "cpu" and dtype == torch.float32


def keeps_blocks(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a model that computes so can keep the blocks of a file."""
    return device.type == "cuda" or blocks_work(dtype, device)


def _int8_kinds(quantization: QuantizationName) -> tuple[Kind, ...]:
    kinds = (*((BytePanelLinear,) if has_bytes() else ()), *((_int8,) if int8_levels() else ()))
    if not kinds:
        raise ConfigError(
            f"--quantization {quantization} needs operators that this torch does not have, or which are wrong on this processor; "
            "use --quantization none"
        )
    return kinds


def _float_kinds(dtype: torch.dtype, device: torch.device) -> tuple[Kind, ...]:
    panels = device.type == "cpu" and dtype == torch.float32 and native() is not None
    packs = can_pack(dtype, device)
    return (*((PanelLinear,) if panels else ()), *((PackedLinear,) if packs else ()), PlainLinear)


def _int8(weight: Tensor, bias: Tensor | None) -> Int8Linear:
    return Int8Linear(weight, bias, levels=int8_levels())


@functools.cache
def _fastest(kinds: tuple[Kind, ...], outputs: int, inputs: int, threads: int) -> Kind:
    """Return the fastest way to keep a matrix of that size; tried once for each size in the life of the process (1,024 x 2,048: 30 ms)."""
    best, least = kinds[0], float("inf")
    for kind in kinds if len(kinds) > 1 else ():
        matrix = kind(torch.ones(outputs, inputs, dtype=torch.float32), None)
        took = math.prod(_seconds(matrix, torch.ones(rows, inputs, dtype=torch.float32)) for rows in TRIAL_ROWS)
        if took < least * WORTH ** -len(TRIAL_ROWS):
            best, least = kind, took
    return best


def _seconds(linear: Linear, x: Tensor) -> float:
    best = float("inf")
    for _ in range(3):  # the first makes its plans
        began = time.perf_counter()
        linear(x)
        best = min(best, time.perf_counter() - began)
    return best
