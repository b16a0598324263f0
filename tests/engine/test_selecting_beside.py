"""Requests that attend to a part of their prefix, and others in the same steps: no request waits for another request's reads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from afterglow.engine.engine import Completion
from afterglow.engine.runner import TorchRunner
from afterglow.engine.token_outputs import RunOutput
from afterglow.errors import RequestError
from afterglow.plan.journal.replaying import replay
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.step import Step
from afterglow.request import Output, Request, SamplingParams, completion_of
from afterglow.store.extents.chunks import ExtentChunks
from tests import doors
from tests.engine.conftest import VOCAB, Handle
from tests.engine.test_exact_reuse import same
from tests.engine.test_selecting import NEW, ROWS, agree, draw, expected, loader_of
from tests.waiting import wait_for

Start = Callable[..., Handle]
Models = Callable[[str], Path]


@contextmanager
def held(handle: Handle, heads: bool = True) -> Iterator[Callable[[], None]]:
    """Reads of chunks do not end before what it yields is called, or the block ends. `heads`: nor do those of heads alone."""
    tier = doors.tier_of(handle.engine.parts.store)
    assert tier is not None
    real, gate = tier.read_chunks, threading.Event()

    def read_chunks(asked: Sequence[ExtentChunks], *args: Any) -> Any:
        if heads or any(each.reads for each in asked):
            gate.wait(60)
        return real(asked, *args)

    tier.read_chunks = read_chunks  # type: ignore[method-assign]
    try:
        yield gate.set
    finally:
        gate.set()
        tier.read_chunks = real  # type: ignore[method-assign]


class Told:
    """What a request is told, collected. `heard` is called with each output before, on the engine's thread."""

    def __init__(
        self,
        handle: Handle,
        name: str,
        prompt: list[int],
        max_tokens: int,
        heard: Callable[[Output], object] = lambda _: None,
        **more: Any,
    ) -> None:
        self._queue: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self.outputs: list[Output] = []
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=VOCAB, ignore_eos=True)
        self.name = name

        def take(output: Output) -> None:
            heard(output)
            self._queue.put(output)

        handle.engine.submit(Request(name, prompt, sampling, **more), take)

    def first(self, timeout: float = 60) -> None:
        self.outputs.append(self._queue.get(timeout=timeout))

    def end(self, timeout: float = 60) -> Completion:
        while not self.outputs or self.outputs[-1].finish_reason is None:
            self.first(timeout)
        return completion_of(self.outputs, 0.0)

    @property
    def silent(self) -> bool:
        return self._queue.empty()


def on_disk(start: Start, model_of: Models, folder: Path, **more: Any) -> tuple[Handle, list[int]]:
    """An engine that has a prefix on disk alone."""
    options = {"importance": 1.0, "importance_exact": "never", "importance_share": 0.0, **more}
    handle = start(model_of("llama"), folder, **options)
    prefix = draw(1, ROWS)
    handle.ask(prefix, max_tokens=1)
    handle.engine.settle()
    handle.engine.demote("disk")
    return handle, prefix


@pytest.mark.parametrize("chunk", [0, 64])
@pytest.mark.parametrize("first", ["selecting", "others"])
def test_a_prompt_that_waits_for_the_disk_delays_no_other_request(
    start: Start, model_of: Models, tmp_path: Path, first: str, chunk: int
) -> None:
    handle, prefix = on_disk(start, model_of, tmp_path, prefill_chunk=chunk)
    new, other = draw("new", 90), draw("other", 150)
    with held(handle) as go_on:
        if first == "selecting":
            slow = Told(handle, "slow", [*prefix, *new], 3, kv_retention=0.3)
        fast = Told(handle, "fast", other, 20)
        if first == "others":
            fast.first()
            slow = Told(handle, "slow", [*prefix, *new], 3, kv_retention=0.3)
        exact = fast.end()
        later = Told(handle, "later", draw("later", 150), 3).end()  # one that comes meanwhile
        assert slow.silent
        go_on()
        agree(slow.end(), expected(handle, prefix, new, 0.3, 3))
    same(exact, handle.ask(other, reuse=False, max_tokens=20))
    same(later, handle.ask(draw("later", 150), reuse=False, max_tokens=3))


def test_a_selecting_reply_that_breaks_ends_no_other_request(
    start: Start, model_of: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the step that draws its third token, as by a grammar."""
    handle, prefix = on_disk(start, model_of, tmp_path)
    real, steps = TorchRunner.run, count()

    def run(self: TorchRunner, step: Step) -> RunOutput:
        out = real(self, step)
        if out.selected and next(steps) == 2:
            out.broken.update(dict.fromkeys(out.selected, RequestError("made up")))
        return out

    monkeypatch.setattr(TorchRunner, "run", run)
    other = draw("other", 150)
    breaks = Told(handle, "breaks", [*prefix, *draw("new", 90)], 20, kv_retention=0.3)
    beside = Told(handle, "beside", other, 20)
    with pytest.raises(RequestError, match="made up"):
        breaks.end()
    same(beside.end(), handle.ask(other, reuse=False, max_tokens=20))
    assert handle.engine.healthy


def test_a_token_that_waits_for_the_disk_delays_no_other_request(
    start: Start, model_of: Models, tmp_path: Path
) -> None:
    handle, prefix = on_disk(start, model_of, tmp_path, importance_alpha=2.0)
    new = draw("new", NEW)
    fast = Told(handle, "fast", draw("other", 100), 150)
    fast.first()
    told: list[int] = []
    with held(handle) as go_on:
        tier = doors.tier_of(handle.engine.parts.store)
        held_read = tier.read_chunks  # type: ignore[union-attr]
        del tier.read_chunks  # type: ignore[union-attr]
        # The prompt's reads come. What follows is held back from the first token on, before the second is computed.
        hold = partial(setattr, tier, "read_chunks", held_read)
        slow = Told(handle, "slow", [*prefix, *new], 12, lambda _: hold(), kv_retention=0.05)
        slow.first()
        later = Told(handle, "later", draw("later", 100), 20).end()
        told += [len(slow.outputs), slow._queue.qsize()]
        assert sum(told) < 12
        go_on()
        agree(slow.end(), expected(handle, prefix, new, 0.05, 12))
    same(fast.end(), handle.ask(draw("other", 100), reuse=False, max_tokens=150))
    same(later, handle.ask(draw("later", 100), reuse=False, max_tokens=20))
    stats = handle.engine.stats().importance
    assert stats is not None
    assert stats.failed_renewals == 0


def test_one_that_waits_can_be_cancelled_and_gives_up_in_time(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle, prefix = on_disk(start, model_of, tmp_path)
    new = draw("new", NEW)
    with held(handle):
        slow = Told(handle, "slow", [*prefix, *new], 3, kv_retention=0.3)
        handle.engine.cancel("slow")
        assert slow.end().finish_reason == "cancelled"
        loader_of(handle).timeout = 0.05
        late = Told(handle, "late", [*prefix, *new], 3, kv_retention=0.3).end()
    assert late.selected is None
    same(late, handle.ask([*prefix, *new], reuse=False, max_tokens=3))


def test_guesses_of_a_cancelled_request_are_settled(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle, prefix = on_disk(start, model_of, tmp_path)
    loader = loader_of(handle)
    loader.prior, loader.bandwidth, loader.budget.seconds = "sinks", 1e9, 1.0
    loader.worth.next = lambda: True  # type: ignore[method-assign]
    tally = loader.stats.tally
    with held(handle, heads=False):
        slow = Told(handle, "slow", [*prefix, *draw("new", NEW)], 3, kv_retention=0.3)
        wait_for(lambda: tally.predicted > 0)
        handle.engine.cancel("slow")
        assert slow.end().finish_reason == "cancelled"
    handle.engine.settle()
    assert tally.predicted == tally.cancelled + tally.wasted
    tally.check()


def test_others_read_together_what_they_share_and_decode_as_always(
    start: Start, model_of: Models, tmp_path: Path
) -> None:
    handle, prefix = on_disk(start, model_of, tmp_path, relay="on", speculate="off")  # guesses make fewer steps
    shared = draw("shared", 120)
    handle.ask(shared, max_tokens=1)
    counts: dict[bool, int] = {}
    for beside in (False, True):
        relayed = handle.engine.parts.runner.relayed
        before = relayed.groups
        asked: list[tuple[str, list[int], dict[str, Any]]] = [
            (f"{i}{beside}", [*shared, i], {"cache_key": "together"}) for i in range(2)
        ]
        if beside:
            asked.append(("selecting", [*prefix, *draw("new", NEW)], {"kv_retention": 0.3}))

        def submit_all() -> list[Told]:
            return [Told(handle, name, prompt, 40, **more) for name, prompt, more in asked]  # noqa: B023

        # From the engine's thread, which takes all in before its next step: none may have ended when another comes.
        done = [each.end() for each in handle.engine.ask(submit_all)]
        counts[beside] = relayed.groups - before
        for i in range(2):
            same(done[i], handle.ask([*shared, i], reuse=False, max_tokens=40))
    agree(done[2], expected(handle, prefix, draw("new", NEW), 0.3, 40))
    assert counts[False] >= 38, counts
    assert counts[True] >= counts[False] - 10


def test_a_prompt_has_a_share_of_each_step_while_others_decode(start: Start, model_of: Models, tmp_path: Path) -> None:
    """A layer at a time, where the rows that are its own are as many as a step's share; and a journal of all that replays."""
    lines = tmp_path / "journal"
    handle, prefix = on_disk(start, model_of, tmp_path / "cache", prefill_chunk=64, journal=lines)
    fast = Told(handle, "fast", draw("other", 30), 300)
    fast.first()
    new = draw("new", 200)
    agree(Told(handle, "slow", [*prefix, *new], 5, kv_retention=0.3).end(), expected(handle, prefix, new, 0.3, 5))
    with held(handle) as go_on:
        waiting = Told(handle, "waiting", [*prefix, *new[1:]], 5, kv_retention=0.3)
        later = Told(handle, "later", draw("later", 100), 20).end()
        go_on()
        agree(waiting.end(), expected(handle, prefix, new[1:], 0.3, 5))
    fast.end()
    assert later.finish_reason == "length"
    handle.engine.close(flush=False)
    text = lines.read_text().splitlines()
    assert sum('"waiting":[' in line for line in text) >= 2
    for step, recorded in replay(text):
        assert step_digest(step) == recorded
