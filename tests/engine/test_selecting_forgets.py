"""Traces of requests that attend to a part of their prefix go with the prefix, and are bounded; idle work gets a share of an
engine that is never idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from afterglow.engine.engine import Engine
from afterglow.plan.batching.batch import Batch
from afterglow.plan.batching.drafts import Drafts
from afterglow.plan.batching.merging import Merging
from afterglow.plan.batching.queue import RequestQueue
from afterglow.plan.cache import Cache
from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.prefix.truncation import Cut
from afterglow.plan.step import JobSpec
from afterglow.request import Output, Request, SamplingParams
from tests import doors
from tests.engine.conftest import Handle
from tests.engine.test_exact_reuse import same
from tests.engine.test_selecting import NEW, ROWS, ask, draw, loader_of, reorder
from tests.engine.test_selecting_beside import Told, held, on_disk
from tests.waiting import wait_for

Start = Callable[..., Handle]
Models = Callable[[str], Path]
_ids = count()


@contextmanager
def load(handle: Handle, prompts: Callable[[int], list[int]] = lambda i: draw(("load", i), 40)) -> Iterator[None]:
    """Two requests at any time: whenever one ends another comes."""
    running = [True]
    ended: list[bool] = []

    def begin() -> None:
        number = next(_ids)
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        handle.engine.submit(Request(f"load{number}", prompts(number), sampling, reuse=False), told)

    def told(output: Output) -> None:
        if output.finish_reason is not None:
            begin() if running[0] else ended.append(True)

    begin()
    begin()
    try:
        yield
    finally:
        running[0] = False
        wait_for(lambda: len(ended) == 2)


@pytest.mark.parametrize("how", ["reset", "reset of a tenant", "session", "expiry"])
def test_what_is_deleted_leaves_the_caches_of_chunks_too(
    start: Start, model_of: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    handle = start(
        model_of("llama"),
        tmp_path,
        importance=1.0,
        importance_exact="never",
        importance_share=0.25,
        reorder_interval=0.0,
    )
    engine, prefix = handle.engine, draw(1, ROWS)
    more: dict[str, Any] = {"salt": "a", "session_id": "s", "ttl_s": 3600.0 if how == "expiry" else None}
    ask(handle, prefix, 1.0, **more)
    engine.settle()
    engine.demote("disk")
    ask(handle, [*prefix, *draw(2, NEW)], 0.3, **more)
    shelf = loader_of(handle).cache
    assert sum(shelf.bytes) > 0
    if how == "session":
        assert engine.forget_session("a", "s")
    elif how == "expiry":  # by a clock that is moved: rows that live for a second may have gone before they are used
        clock = engine.parts.clock
        engine.ask(lambda: monkeypatch.setattr(engine.parts, "clock", lambda: clock() + 3601))
    else:
        engine.reset_cache("a" if how == "reset of a tenant" else None)
    wait_for(lambda: engine.ask(lambda: (sum(shelf.bytes), len(shelf.placement)) == (0, 0)))
    wait_for(lambda: not list(tmp_path.glob("*/extents/*/*.safetensors")))


def test_what_is_evicted_leaves_the_caches_of_chunks_too(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(
        model_of("llama"), tmp_path, importance=1.0, importance_exact="never", importance_share=0.25,
        disk_cache=1 << 21, host_cache=3 << 18,
    )  # fmt: skip
    cache = loader_of(handle).cache.placement
    for i in range(20):
        prefix = draw(("evicted", i), ROWS)
        handle.ask(prefix, max_tokens=1)
        handle.engine.settle()
        handle.engine.demote("disk")
        ask(handle, [*prefix, *draw(i, NEW)], 0.3)
        handle.engine.settle()
        there = {path.stem for path in tmp_path.glob("*/extents/*/*.safetensors")}
        known = handle.engine.ask(lambda: {name.extent for name in doors.known_chunks(cache)})
        assert known
        assert known <= there
    assert len(there) < 20


@pytest.mark.parametrize("when", ["waits", "is under way", "has not ended"])
def test_a_prompt_that_waits_to_be_computed_exactly_goes_with_a_reset(
    start: Start, model_of: Models, tmp_path: Path, when: str
) -> None:
    handle, prefix = on_disk(start, model_of, tmp_path, importance_exact="idle")
    engine, prompt = handle.engine, [*prefix, *draw(2, NEW)]
    other = Told(handle, "other", draw("other", 60), 120)
    other.first()
    if when == "has not ended":
        with held(handle):
            slow = Told(handle, "slow", prompt, 2, kv_retention=0.3)
            wait_for(lambda: engine.ask(lambda: _runs(engine, "slow")))  # beside the other, or after it
            engine.reset_cache()
            engine.ask(lambda: None)
        slow.end()
    else:
        # Right behind the step that ends it: the engine's thread begins such work by itself when all others have ended.
        then = partial(_begin_exact, engine) if when == "is under way" else partial(engine.loop.reset, None)
        quick = Told(
            handle, "quick", prompt, 2, lambda output: output.finish_reason and engine.parts.inbox.send(then),
            kv_retention=0.3,
        )  # fmt: skip
        quick.end()
    other.end()
    engine.settle()
    again = ask(handle, [*prompt, 1, 2], 1.0)
    assert again.cached.total <= (ROWS if when == "has not ended" else 0)  # rows in use stay
    same(again, handle.ask([*prompt, 1, 2], reuse=False, max_tokens=3))


def _runs(engine: Engine, name: str) -> bool:
    live = engine.loop.requests.by_job
    return any(live[job.spec.job].request.id == name for job in doors.running_of(engine.parts.scheduler))


def _begin_exact(engine: Engine) -> None:
    aside = engine.loop.idle_work
    aside.computed(10_000)
    assert aside.begin(engine.parts.clock(), False, engine.loop.submit_own)
    assert len(doors.work_under_way(aside)) == 1
    engine.loop.reset(None)


def test_a_conversation_is_forgotten_with_what_was_computed_aside(
    start: Start, model_of: Models, tmp_path: Path
) -> None:
    """The exact rows of a turn that selected belong to its conversation."""
    handle = start(model_of("llama"), tmp_path, importance=0.25)
    engine, first, second = handle.engine, draw(1, ROWS), draw(2, 100)
    ask(handle, first, None, session_id="s")
    engine.settle()
    done = ask(handle, [*first, *second], None, session_id="s")
    assert done.selected is not None
    engine.settle()  # computes the prompt again
    (known,) = engine.sessions("")
    assert engine.forget_session("", "s")
    engine.settle()
    assert list(tmp_path.glob("*/extents/*/*.safetensors")) == []
    assert ask(handle, [*first, *second, 1], 1.0).cached.total == 0
    assert known.tokens >= ROWS + 100


def test_what_is_computed_aside_is_its_conversations_and_no_turn_of_it(
    start: Start, model_of: Models, tmp_path: Path
) -> None:
    handle, prefix = on_disk(start, model_of, tmp_path, importance_exact="idle")
    specs: list[JobSpec] = []
    submit = handle.engine.parts.scheduler.submit

    def noted(spec: JobSpec, now: float) -> Cut | None:
        specs.append(spec)
        return submit(spec, now)

    handle.engine.parts.scheduler.submit = noted  # type: ignore[method-assign]
    ask(handle, [*prefix, *draw(2, NEW)], 0.3, session_id="s")
    handle.engine.settle()
    turn, own = specs
    assert (own.session, own.aside, turn.aside) == ("s", True, False)
    cache = Cache(Capacity(device_rows=64, host_slots=0), SchedulerOptions())
    line = RequestQueue(cache, Batch(cache, Drafts(cache), Merging(cache, 0)), SchedulerOptions())
    for spec in (own, turn):
        line.arrive(spec, 0, None, unscored=False)
    jobs = list(line.jobs.values())
    assert line.is_next_turn(jobs[1])
    assert jobs[0].owner == jobs[1].owner == jobs[1].conversation


def test_exact_rows_and_orders_come_under_load_too(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle, prefix = on_disk(
        start, model_of, tmp_path, importance_exact="idle", reorder_interval=0.05, importance_share=0.25
    )
    loader, aside = loader_of(handle), handle.engine.loop.idle_work
    with load(handle):
        prompt = [*prefix, *draw(2, NEW)]
        ask(handle, prompt, 0.3)
        wait_for(lambda: not doors.waiting_work(aside) and not doors.work_under_way(aside))
        wait_for(lambda: loader.stats.reordered >= 1)
        exact = ask(handle, [*prompt, 1, 2], 1.0)
        assert exact.cached.total == ROWS + NEW
    same(exact, handle.ask([*prompt, 1, 2], reuse=False, max_tokens=3))


def test_under_load_what_is_computed_aside_is_a_share_of_all(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle, prefix = on_disk(start, model_of, tmp_path, importance_exact="idle", reorder_interval=0.0)
    own: list[int] = []
    others: list[int] = []
    run = handle.engine.parts.runner.run

    def counted(step):  # type: ignore[no-untyped-def]
        for each in step.runs:
            (own if handle.engine.loop.requests.by_job[each.job].spec.aside else others).append(len(each.tokens))
        return run(step)

    handle.engine.parts.runner.run = counted  # type: ignore[method-assign]
    with load(handle):
        for i in range(12):
            ask(handle, [*prefix, *draw(("many", i), 60)], 0.3)
        wait_for(lambda: len(own) >= 3)
        assert sum(own) <= 0.1 * sum(others) + 2 * 64


def test_an_extent_is_rewritten_only_where_its_rows_would_lie_otherwise(
    start: Start, model_of: Models, tmp_path: Path
) -> None:
    handle, prefix = on_disk(start, model_of, tmp_path, importance_renew=0)
    prompts = [[*prefix, *draw(i, NEW)] for i in range(4)]

    def inodes() -> set[int]:
        return {path.stat().st_ino for path in tmp_path.glob("*/extents/*/*.safetensors")}

    for prompt in prompts:
        ask(handle, prompt, 0.2)
    before = inodes()
    assert reorder(handle) == 1
    assert inodes() != before
    before = inodes()
    for prompt in prompts:
        ask(handle, prompt, 0.2)
    assert reorder(handle) == 0
    assert inodes() == before


def test_what_is_known_of_chunks_does_not_grow_with_versions(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle, prefix = on_disk(start, model_of, tmp_path, importance_share=0.25, importance_renew=0)
    loader = loader_of(handle)
    known: list[int] = []
    for i in range(4):
        for j in range(3):
            ask(handle, [*prefix, *draw((i, j), NEW)], 0.2)
        known.append(len(loader.cache.placement))
        handle.engine.ask(lambda: loader.importance.clear())  # so that the next order is another one
        ask(handle, [*prefix, *draw((i, "other"), NEW)], 0.2)
        assert reorder(handle) == 1
    assert len(loader.cache.placement) == 0, "of a file that is gone"
    most = 2 * (2 * 4 + 2)  # layers; chunks of keys and values, and the probe keys and means of each
    assert max(known) <= most
    assert len(doors.layout_orders(loader)) <= 5
