"""Decode of one request: a mixture of experts beside a dense model with the same active weights. `python -m benchmarks.engine.experts`.

Both have random weights of one shape; the dense MLP is as wide as the experts that a token takes. Steps of both take turns, and a
step's cost is the processor time of its thread, so that other programs disturb it little. Prints a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from afterglow.choices import QuantizationName
from afterglow.model.decoder import Decoder, PlainAttend
from afterglow.model.names import Names
from afterglow.model.spec import ExpertsSpec, ModelSpec, RopeSpec
from afterglow.model.weights import WeightAssembler

COUNT, CHOSEN, WIDTH, LAYERS = 16, 2, 1408, 8
DENSE = ModelSpec(
    family="llama",
    layers=LAYERS,
    hidden=1024,
    heads=16,
    kv_heads=4,
    head_dim=64,
    ffn=CHOSEN * WIDTH,
    vocab=32000,
    max_positions=2048,
    rope=RopeSpec(dim=64, base=10000.0),
)
MIXTURE = dataclasses.replace(
    DENSE, family="qwen3_moe", experts=ExpertsSpec(count=COUNT, chosen=CHOSEN, ffn=WIDTH, layers=tuple(range(LAYERS)))
)
KINDS: tuple[QuantizationName, ...] = ("none", "int8", "int4")


class Pool:
    """Weights that are cut out of one run of random numbers: made in no time, and no two tensors alike."""

    def __init__(self) -> None:
        self._numbers = torch.randn(1 << 26, generator=torch.Generator().manual_seed(0)).mul_(0.02)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor: see `WeightSource`."""
        size = torch.Size(shape).numel()
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % (len(self._numbers) - size)
        found = self._numbers[start : start + size].view(shape)
        return found + 1 if len(shape) == 1 else found

    def packed(self, name: str, shape: tuple[int, int]) -> None:
        """Return None: all weights are numbers."""
        return


def model(spec: ModelSpec, source: Pool, quantization: QuantizationName) -> Decoder:
    return WeightAssembler(spec, Names(), source, torch.float32, torch.device("cpu"), quantization).decoder()


def step(decoder: Decoder, token: int, head: bool) -> float:
    """Compute a token's step, with or without the head: seconds of processor time."""
    ids, positions = torch.tensor([token]), torch.zeros(1, dtype=torch.int64)
    attend = PlainAttend(decoder, positions, [1])
    began = time.thread_time()
    hidden = decoder.forward(ids, positions, attend)
    if head:
        decoder.logits(hidden)
    return time.thread_time() - began


def compare(decoders: Sequence[Decoder], steps: int, head: bool) -> list[float]:
    """Return the median of a step of each, in milliseconds; steps take turns."""
    took: list[list[float]] = [[] for _ in decoders]
    for token in range(steps):
        for times, decoder in zip(took, decoders, strict=True):
            times.append(step(decoder, token * 7 % DENSE.vocab, head))
    return [statistics.median(times[len(times) // 8 :]) * 1e3 for times in took]


def main(args: Sequence[str] | None = None, say: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--weights", choices=KINDS, nargs="*", default=KINDS)
    chosen = parser.parse_args(args)
    torch.set_num_threads(1)
    source = Pool()
    say("| weights | what | dense, ms | 16 experts, 2 chosen, ms | times |\n|---|---|---|---|---|")
    for kind in chosen.weights:
        decoders = [model(spec, source, kind) for spec in (DENSE, MIXTURE)]
        for head in (False, True):
            dense, mixture = compare(decoders, chosen.steps, head)
            what = "layers and head" if head else "layers"
            say(f"| {kind} | {what} | {dense:.2f} | {mixture:.2f} | {mixture / dense:.2f} |")


if __name__ == "__main__":
    main()
