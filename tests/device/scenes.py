"""What an engine answers on a device: each scene returns what `play.py` prints as JSON."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine import hardware, token_outputs
from afterglow.engine.engine import Engine
from afterglow.errors import ConfigError
from afterglow.request import Request, SamplingParams

MiB = 2**20


def load(device: str, folder: Path, **options: Any) -> Engine:
    cache = CacheConfig(
        device_cache=16 * MiB,
        host_cache=8 * MiB,
        disk_cache=64 * MiB,
        cache_dir=folder,
        source="load",
        warm_start=False,
    )
    engine = Engine.load("tiny", EngineConfig(device=device, dtype="float32", cache=cache, **options))
    engine.start()
    return engine


def ask(engine: Engine, prompts: list[list[int]], **more: Any) -> list[Any]:
    sampling = SamplingParams(max_tokens=6, temperature=0, logprobs=2, ignore_eos=True)
    numbers = [f"r{random.random()}" for _ in prompts]
    done = engine.generate([Request(n, p, sampling, **more) for n, p in zip(numbers, prompts, strict=True)])
    return [[list(each.tokens), each.cached.total, [lp.logprob for lp in each.logprobs]] for each in done]


def draw(seed: int, rows: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 200) for _ in range(rows)]


def reuse(device: str, folder: Path) -> list[Any]:
    """Prefill, then reuse from device, host and disk, then a batch that shares a prefix."""
    engine = load(device, folder, relay="on")
    prefix = draw(1, 200)
    found = ask(engine, [prefix])
    for tier in ("device", "host", "disk"):
        engine.settle()
        if tier != "device":
            engine.demote(tier)
        found += ask(engine, [[*prefix, *draw(len(found), 10)]])
    found += ask(engine, [[*prefix, *draw(100 + i, 5 + i)] for i in range(4)])
    engine.close()
    return found


def importance(device: str, folder: Path) -> list[Any]:
    """A part of a prefix that lies on disk, whose reads are measured and guessed ahead."""
    engine = load(device, folder, importance=0.5, importance_exact="never")
    prefix = draw(2, 260)
    found = ask(engine, [prefix])
    for i in range(3):
        engine.settle()
        engine.demote("disk")
        found += ask(engine, [[*prefix, *draw(10 + i, 20)]])
    engine.close()
    return found


def choice(device: str, folder: Path) -> list[Any]:
    """What `auto` takes, and what it takes when the device gives other answers."""
    sample = token_outputs.sample

    def other(logits: Any, samplers: Any) -> list[int]:
        tokens = sample(logits, samplers)
        return [token ^ 1 for token in tokens] if logits.is_cuda else tokens

    found = []
    for how in (sample, other):
        with mock.patch.object(token_outputs, "sample", how):
            engine = load("auto", folder / how.__name__)
        found.append(engine.decoder.device.type)
        engine.close()
    return found


def memory(device: str, folder: Path) -> list[Any]:
    """How much memory is locked, whether it is let go, and what a limit says."""
    from tests.device.pretend import runtime

    arena = hardware.allocate(3 * MiB + 4096, pin=True)
    found: list[Any] = [list(runtime.locked.values())]
    del arena
    found.append(list(runtime.locked.values()))
    runtime.limit = MiB
    try:
        hardware.allocate(2 * MiB, pin=True)
    except ConfigError as error:
        found.append(str(error))
    return found
