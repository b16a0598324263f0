"""Try a CUDA device before `--device auto` takes it: the device must give the same answers as the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from afterglow.config import CacheConfig, EngineConfig
from afterglow.request import Completion, Request, SamplingParams

log = logging.getLogger("afterglow.engine")

MODEL = "tiny"  # a preset: random weights, made in milliseconds
PROMPT = tuple(range(3, 153))  # more than two blocks
TOKENS = 8
TOLERANCE = 1e-2  # of log-probabilities in float32; the CPU's own variants differ by 1e-5


class Trial(Protocol):
    """Describe the methods of an engine that the self-test calls."""

    def start(self) -> None: ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...

    def demote(self, tier: Literal["host", "disk"]) -> None: ...

    def close(self, flush: bool = ...) -> None: ...


def works(load: Callable[[EngineConfig], Trial], device: str) -> bool:
    """Compute a prompt on `device`, then a longer one that reuses its rows from host memory, and compare tokens and
    log-probabilities (within TOLERANCE) with the CPU's. `load` makes an engine of the preset MODEL."""
    try:
        expected, found = _answers(load, "cpu"), _answers(load, device)
    except Exception:  # a driver that does not fit, a kernel that is missing: there are many ways, and all mean no
        log.exception("the self-test of %s failed, so the CPU is used", device)
        return False
    for theirs, ours in zip(expected, found, strict=True):
        if theirs.tokens != ours.tokens or theirs.cached.total != ours.cached.total or _gap(theirs, ours) > TOLERANCE:
            log.error("the self-test of %s gave other answers than the CPU, so the CPU is used", device)
            return False
    log.warning(
        "%s has passed a self-test and is used; its speed has not been measured by this project (--device cpu goes without)",
        device,
    )
    return True


def _answers(load: Callable[[EngineConfig], Trial], device: str) -> list[Completion]:
    cache = CacheConfig(host_cache=64 * 2**20, device_cache=64 * 2**20, disk_cache=0)
    engine = load(EngineConfig(device=device, dtype="float32", cache=cache))
    engine.start()
    try:
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=1)
        (first,) = engine.generate([Request("prefill", PROMPT, sampling)])
        engine.demote("host")
        (second,) = engine.generate([Request("reuse", (*PROMPT, *first.tokens, 5, 4, 3), sampling)])
        return [first, second]
    finally:
        engine.close(flush=False)


def _gap(a: Completion, b: Completion) -> float:
    """Compute the largest difference between log-probabilities of two replies with the same tokens."""
    return max(abs(x.logprob - y.logprob) for x, y in zip(a.logprobs, b.logprobs, strict=True))
