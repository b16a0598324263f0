"""One thread owns the plan; callers see numbers that were published, and cannot harm one another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afterglow.engine.engine import Engine
from afterglow.request import Output, Request, SamplingParams
from tests.engine.conftest import VOCAB, Handle, model_of, start, submit_at_once  # noqa: F401  (fixtures)


class Watched:
    """The plan, and which threads use it."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.seen: set[tuple[str, str]] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if not callable(found):
            self.seen.add((threading.current_thread().name, name))
            return found

        def call(*args: Any, **more: Any) -> Any:
            self.seen.add((threading.current_thread().name, name))
            return found(*args, **more)

        return call


def request(name: str, prompt: list[int], max_tokens: int = 4, **more: Any) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True), **more)


def words(seed: int, count: int) -> list[int]:
    return [(i * i + seed * i + seed) % VOCAB for i in range(count)]


def collect(engine: Engine, asked: Request) -> queue.SimpleQueue[Output]:
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(asked, outputs.put)
    return outputs


def last(outputs: queue.SimpleQueue[Output]) -> Output:
    while True:
        output = outputs.get(timeout=30)
        if output.finish_reason is not None:
            return output


def test_only_the_engines_thread_uses_the_plan(
    start: Callable[..., Handle], model_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(model_of("llama"), tmp_path).engine
    engine.settle()
    plan = Watched(engine.parts.scheduler)
    monkeypatch.setattr(engine.parts, "scheduler", plan)
    talk = words(1, 100)
    engine.generate([request("a", talk, session_id="talk")])
    engine.settle()
    engine.stats()
    assert [session.name for session in engine.sessions("")] == ["talk"]
    assert engine.pin_session("", "talk", True)
    engine.register_prefix("system", words(2, 80), salt="")
    assert [prefix.name for prefix in engine.prefixes("")] == ["system"]
    assert engine.forget_prefix("system", salt="")
    engine.discard(talk, range(10, 30), system_rows=0)
    assert engine.forget_session("", "talk")
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    cancelled = threading.Event()

    def take(output: Output) -> None:
        outputs.put(output)
        cancelled.wait(30)  # it does not end before it is cancelled, however late that is

    engine.submit(request("b", talk, 200), take)
    engine.cancel("b")
    cancelled.set()
    assert last(outputs).finish_reason == "cancelled"
    engine.reset_cache()
    engine.settle()
    assert {thread for thread, _ in plan.seen} == {"afterglow-engine"}, plan.seen


def test_what_a_caller_is_told_of_is_counted(start: Callable[..., Handle], model_of: Callable[[str], Path]) -> None:
    engine = start(model_of("llama")).engine
    seen: queue.SimpleQueue[tuple[int, int, str | None]] = queue.SimpleQueue()

    def sink(output: Output) -> None:
        stats = engine.stats()
        seen.put((stats.engine.generation_tokens, stats.engine.finished["length"], output.finish_reason))

    engine.submit(request("a", words(1, 50), 3), sink)
    assert [seen.get(timeout=30) for _ in range(3)] == [(1, 0, None), (2, 0, None), (3, 1, "length")]


def test_published_numbers_do_not_change(start: Callable[..., Handle], model_of: Callable[[str], Path]) -> None:
    handle = start(model_of("llama"))
    handle.ask(words(1, 50))
    before = handle.engine.stats()
    told = repr(before)
    handle.ask(words(2, 50))
    assert repr(before) == told
    assert handle.engine.stats().engine.prompt_tokens == before.engine.prompt_tokens + 50


@pytest.mark.parametrize("when", ["first token", "last token", "always"])
def test_a_sink_that_raises_ends_its_own_request_and_no_other(
    start: Callable[..., Handle], model_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture, when: str
) -> None:
    engine = start(model_of("llama")).engine
    heard: list[Output] = []

    def broken(output: Output) -> None:
        heard.append(output)
        if when == "always" or (output.finish_reason is not None) == (when == "last token"):
            raise ValueError("a caller's own mistake")

    other: queue.SimpleQueue[Output] = queue.SimpleQueue()
    asked = [(request("other", words(1, 60), 40), other.put), (request("broken", words(2, 60), 5), broken)]
    submit_at_once(engine, asked)  # the broken one ends before the other
    assert last(other).finish_reason == "length"
    assert last(collect(engine, request("later", words(3, 60)))).finish_reason == "length"
    assert engine.healthy
    stats = engine.stats()
    assert len(heard) == (5 if when == "last token" else 1)
    assert (stats.engine.finished["cancelled"], stats.engine.finished["length"]) == (
        (0, 3) if when == "last token" else (1, 2)
    )
    assert stats.plan.running == stats.plan.waiting == stats.plan.loading == 0
    assert "the sink of request broken has failed" in caplog.text
    engine.submit(request("broken", words(2, 60)), heard.append)  # its id is free again
