"""An engine in this process, and requests to it, timed from the first output on."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from afterglow.config import EngineConfig
from afterglow.engine.engine import Engine
from afterglow.request import CachedTokens, Output, Request, SamplingParams

_ids = count()


@dataclass
class Turn:
    """One request under way. Times are of `time.perf_counter`."""

    asked: float = 0.0
    first: float = 0.0
    last: float = 0.0
    waited: float = 0.0  # seconds until its first step
    cached: CachedTokens = CachedTokens()
    tokens: list[int] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def ttft(self) -> float:
        return self.first - self.asked


@contextmanager
def running(model: str | Path, config: EngineConfig) -> Iterator[Engine]:
    """Load a model and run its engine, which writes nothing to disk at the end."""
    engine = Engine.load(model, config)
    engine.start()
    try:
        yield engine
    finally:
        engine.close(flush=False)


def greedy(prompt: list[int], max_tokens: int = 1, **more: Any) -> Request:
    """Make a request for the likeliest tokens, so many of them whatever they are."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Request(f"bench-{next(_ids)}", prompt, sampling, **more)


def ask(
    engine: Engine, prompt: list[int], max_tokens: int = 1, at_end: Callable[[], object] | None = None, **more: Any
) -> Turn:
    """Submit a greedy request; the turn is filled in while it runs. The engine's thread calls `at_end` when it has ended."""
    turn = Turn(asked=time.perf_counter())

    def take(output: Output) -> None:
        now = time.perf_counter()
        turn.first = turn.first or now
        turn.cached, turn.waited = output.cached, output.waited
        turn.tokens += output.tokens
        if output.finish_reason is not None:
            turn.last = now
            turn.ended.set()
            if at_end is not None:
                at_end()

    engine.submit(greedy(prompt, max_tokens, **more), take)
    return turn


def asked(engine: Engine, prompt: list[int], max_tokens: int = 1, **more: Any) -> Turn:
    """Submit a greedy request and wait for its end."""
    turn = ask(engine, prompt, max_tokens, **more)
    turn.ended.wait()
    return turn


def words(rng: random.Random, engine: Engine, number: int) -> list[int]:
    """Draw random tokens of the engine's vocabulary."""
    return [rng.randrange(engine.vocab_size) for _ in range(number)]
