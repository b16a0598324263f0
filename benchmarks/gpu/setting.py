"""Sizes of a run, what the machine can do at best, and what a part finds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from afterglow.bench.report import hardware, show
from afterglow.engine.hardware import allocate

T = TypeVar("T")

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
MiB, GiB = 2**20, 2**30


@dataclass(frozen=True)
class Setting:
    """`tiny`: small shapes and few repeats, to see that a part runs. `tests_on`: what tells the tests which device to take (see
    `tests/device/plugin.py`)."""

    tiny: bool
    seed: int = 0
    tests_on: str = "--real-device"

    def of(self, full: T, tiny: T) -> T:
        """Choose a size."""
        return tiny if self.tiny else full


class Found(NamedTuple):
    """What a part finds; `note`: why there are no rows."""

    rows: list[dict[str, Any]]
    goals: list[dict[str, Any]]
    note: str = ""


def seconds(call: Callable[[], object], times: int = 1) -> float:
    """Measure a call, of `times` one after the other, until the device has done it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def recorded(call: Callable[[], object], times: int) -> Callable[[], object]:
    """Record `times` calls as a CUDA graph, as the engine's decode steps are: what is measured then is the device, and not launching.
    Returns the graph's replay."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph.replay


def median_seconds(call: Callable[[], object], repeats: int, times: int = 1) -> tuple[float, list[float]]:
    """Measure a call after one that warms up. Returns the median and all samples."""
    call()
    samples = [seconds(call, times) for _ in range(repeats)]
    return statistics.median(samples), samples


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches: bytes/s from locked host memory to the device, bytes/s of the device's memory, and operations/s of a
    matrix product in bfloat16. Medians, since figures that stand beside them are medians."""

    copy: float
    memory: float
    flops: float

    @classmethod
    def measured(cls, setting: Setting) -> Ceilings:
        size, repeats = setting.of(GiB, MiB), setting.of(9, 1)
        host = allocate(size, pin=True)
        device = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        copying, _ = median_seconds(lambda: device.copy_(host, non_blocking=True), repeats)
        numbers = torch.ones(2 * size // 4, dtype=torch.float32, device=DEVICE)
        other = torch.empty_like(numbers)
        reading, _ = median_seconds(numbers.sum, repeats)
        both, _ = median_seconds(lambda: other.copy_(numbers), repeats)
        memory = max(2 * size / reading, 4 * size / both)  # the second reads and writes
        side = setting.of(8192, 64)
        # Products of ones take less power, and so less time.
        a, b = (torch.randn(side, side, dtype=DTYPE, device=DEVICE) for _ in range(2))
        product, _ = median_seconds(lambda: a @ b, repeats, setting.of(10, 1))
        return cls(size / copying, memory, 2 * side**3 / product)

    def show(self) -> None:
        print(
            f"ceilings: {self.copy / 1e9:.1f} GB/s from locked host memory, {self.memory / 1e9:.0f} GB/s of device memory, "
            f"{self.flops / 1e12:.0f} TFLOP/s of a matrix product in bfloat16",
            flush=True,
        )


def table(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows that have the same keys."""
    if rows:
        show(title, list(rows[0]), [list(row.values()) for row in rows])


def about(setting: Setting, ceilings: Ceilings | None) -> dict[str, Any]:
    """What the file of a part begins with."""
    facts = {"hardware": hardware(), "tiny": setting.tiny, "seed": setting.seed}
    return facts | ({} if ceilings is None else {"ceilings": asdict(ceilings)})


ROOT = Path(__file__).parents[2]
