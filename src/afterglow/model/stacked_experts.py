"""Checkpoints in safetensors whose experts lie in one tensor for each layer, in floats or in MXFP4: gpt-oss.

Floats: `gate_up_proj` [experts, inputs, outputs]. MXFP4: `gate_up_proj_blocks` [experts, outputs, inputs / 32, 16], two neighbours in
a byte, the first one in its low half, and `gate_up_proj_scales` [experts, outputs, inputs / 32], powers of two. Biases:
`gate_up_proj_bias` [experts, outputs]. `down_proj` likewise.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from afterglow.errors import ModelError
from afterglow.kernels.packed import GROUP, dequantize
from afterglow.model.checkpoint import UnpackedCheckpoint
from afterglow.model.tables import PackedTensor

EXPERT = re.compile(r"(?P<place>.*\.experts)\.(?P<number>\d+)\.(?P<module>\w+)\.(?P<kind>weight|bias)")
BYTES = GROUP // 2  # of a group's numbers
NUMBERS, BYTE = (torch.float32, torch.bfloat16, torch.float16), (torch.uint8,)


class StackedExperts(UnpackedCheckpoint):
    """A source of weights in which each expert has a module of its own, `...experts.NUMBER.gate_up_proj`."""

    @property
    def in_blocks(self) -> bool:
        """Whether there are tensors for `packed`."""
        return any(name.endswith("_proj_blocks") for name in self._files.names)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor, dequantised if need be: see `WeightSource`."""
        found = EXPERT.fullmatch(name)
        if found is None:
            return self._files.get(name, shape)
        if found["kind"] == "weight" and self._files.has(f"{found['place']}.{found['module']}_blocks"):
            return dequantize(*self._blocks(found, (shape[0], shape[1]))[:2])
        whole, number = f"{found['place']}.{found['module']}", int(found["number"])
        if found["kind"] == "bias":
            return _shaped(f"{whole}_bias", self._files.piece(f"{whole}_bias", number), shape)
        return _shaped(whole, self._files.piece(whole, number), shape[::-1]).T

    def packed(self, name: str, shape: tuple[int, int]) -> PackedTensor | None:
        """Return a matrix in blocks: see `WeightSource`."""
        found = EXPERT.fullmatch(name)
        if found is None or not self._files.has(f"{found['place']}.{found['module']}_blocks"):
            return None
        return self._blocks(found, shape)

    def _blocks(self, found: re.Match[str], shape: tuple[int, int]) -> PackedTensor:
        whole, number = f"{found['place']}.{found['module']}", int(found["number"])
        outputs, groups = shape[0], shape[1] // GROUP
        if shape[1] % GROUP:
            raise ModelError(f"{whole} is in blocks of {GROUP} numbers, config.json asks for rows of {shape[1]}")
        scales = _shaped(f"{whole}_scales", self._files.piece(f"{whole}_scales", number), (outputs, groups), BYTE)
        bytes_of = _shaped(
            f"{whole}_blocks", self._files.piece(f"{whole}_blocks", number), (outputs, groups, BYTES), BYTE
        )
        numbers = torch.stack((bytes_of & 15, bytes_of >> 4), -1).flatten(2)
        halves = numbers[..., :BYTES] | numbers[..., BYTES:] << 4
        return PackedTensor(torch.cat((scales[..., None], halves), -1).flatten(1), "MXFP4")


def _shaped(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = NUMBERS) -> Tensor:
    """Return `tensor`, of one expert. Raises: ModelError if its shape is another than `shape`, or its dtype none of `dtypes`."""
    if tensor.dtype not in dtypes:
        known, found = (", ".join(str(d).removeprefix("torch.") for d in each) for each in (dtypes, (tensor.dtype,)))
        raise ModelError(f"{name} has dtype {found}; supported is {known}")
    if tuple(tensor.shape) != shape:
        raise ModelError(f"{name} has shape {tuple(tensor.shape)} for each expert, config.json asks for {shape}")
    return tensor
