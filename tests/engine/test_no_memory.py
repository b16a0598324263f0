"""A device that runs out of memory in a forward pass: the newest request waits or ends, and all others go on."""

from __future__ import annotations

import gc
import queue
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
import torch

from afterglow.engine.context import DeviceContext
from afterglow.engine.engine import Completion, Engine
from afterglow.engine.kv_shape import KVShape
from afterglow.engine.page_pool import PagePool
from afterglow.engine.tee import Tee
from afterglow.errors import RequestError
from afterglow.plan.journal.replaying import replay
from afterglow.plan.journal.step_digest import step_digest
from afterglow.request import Output, Request, SamplingParams, completion_of
from tests.engine.conftest import VOCAB, Handle
from tests.engine.test_exact_reuse import same
from tests.engine.test_selecting import draw

Start = Callable[..., Handle]
Models = Callable[[str], Path]

_ids = count()


@contextmanager
def room_for(rows: int, layer: int = 1) -> Iterator[list[int]]:
    """Fail each pass over more than `rows` rows in this layer. Returns the rows of the failed passes."""
    failed: list[int] = []
    tee = Tee.layer

    def layer_of(self: Tee, number: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if number == layer and len(keys) > rows:
            failed.append(len(keys))
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        tee(self, number, keys, values)

    with mock.patch.object(Tee, "layer", layer_of):
        yield failed


def at_once(engine: Engine, prompts: list[list[int]], max_tokens: int = 20) -> list[Completion]:
    """Ask all together: the engine's thread takes them in before its next step."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=VOCAB, ignore_eos=True)
    requests = [Request(f"m{next(_ids)}", prompt, sampling) for prompt in prompts]
    found: dict[str, list[Output]] = {request.id: [] for request in requests}
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def sink(output: Output) -> None:
        found[output.request_id].append(output)
        if output.finish_reason is not None:
            ended.put(output.request_id)

    def submit_all() -> None:
        for request in requests:
            engine.submit(request, sink)

    engine.parts.inbox.send(submit_all)
    for _ in requests:
        ended.get(timeout=60)
    return [completion_of(found[request.id], 0.0) for request in requests]


@pytest.mark.parametrize("layer", [0, 1])
def test_the_newest_wait_and_every_answer_is_right(start: Start, model_of: Models, tmp_path: Path, layer: int) -> None:
    journal = tmp_path / "journal.jsonl"
    handle = start(model_of("llama"), tmp_path / "cache", journal=journal)
    prompts = [draw(i, 70 + 10 * i) for i in range(4)]
    wanted = [handle.ask(prompt, reuse=False, max_tokens=20) for prompt in prompts]
    with room_for(160, layer) as failed:
        found = at_once(handle.engine, prompts)
    assert failed, "nothing ran out of memory"
    assert handle.engine.stats().plan.counters.preemptions >= 2
    for ours, theirs in zip(found, wanted, strict=True):
        same(ours, theirs)
    handle.engine.settle()
    handle.engine.demote("disk")  # rows that were saved meanwhile are right too
    for prompt, theirs in zip(prompts, wanted, strict=True):
        again = handle.ask(prompt, max_tokens=20)
        assert again.cached.disk >= 64
        same(again, theirs)
    handle.engine.close()
    steps = list(replay(journal.read_text().splitlines()))
    assert steps
    assert all(step_digest(step) == recorded for step, recorded in steps)


def test_a_request_that_does_not_fit_alone_ends_and_says_so(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(model_of("llama"), tmp_path)
    with room_for(160), pytest.raises(RequestError, match="no memory left for this request; send a shorter prompt"):
        handle.ask(draw("long", 200))
    assert handle.engine.healthy
    short = draw("short", 100)
    same(handle.ask(short), handle.ask(short, reuse=False))


def test_room_that_cannot_be_had_for_a_context_is_the_same(start: Start, model_of: Models, tmp_path: Path) -> None:
    """The context of a job that joins fails before anything of the step is computed."""
    handle = start(model_of("llama"), tmp_path)
    prompts = [draw(f"c{i}", 90) for i in range(2)]
    wanted = [handle.ask(prompt, reuse=False, max_tokens=20) for prompt in prompts]
    from afterglow.engine import runner

    real, made = runner.DeviceContext, count()

    def scarce(*args: object) -> object:
        if next(made) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return real(*args)  # type: ignore[arg-type]

    with mock.patch.object(runner, "DeviceContext", scarce):
        found = at_once(handle.engine, prompts)
    assert handle.engine.stats().plan.counters.preemptions == 1
    for ours, theirs in zip(found, wanted, strict=True):
        same(ours, theirs)


def test_a_take_over_that_fails_half_way_is_repeated_as_a_whole() -> None:
    """The page that new rows go to is another context's as well: without a copy they would be written there."""
    shape = KVShape(1, 1, 4, torch.float32, torch.device("cpu"))
    pool = PagePool(shape, 2**20)
    context, other = DeviceContext(shape, pool), DeviceContext(shape, pool)
    context.make_room(130)
    context.write(0, 0, *torch.ones(2, 130, 1, 4))
    context.rows = 130
    other.share(context, 128)
    with mock.patch.object(pool, "take", side_effect=torch.OutOfMemoryError), pytest.raises(torch.OutOfMemoryError):
        context.cut(100)
    with pytest.raises(AssertionError, match="a page of its own"):
        context.make_room(101)
    context.cut(100)
    context.make_room(101)
    context.write(0, 100, *torch.zeros(2, 1, 1, 4))
    assert (other.read(0, 0, 128)[0] == 1).all()
    assert (context.read(0, 0, 100)[0] == 1).all()


def test_memory_of_unused_pages_goes_back() -> None:
    """Where the device had none left, and without waiting for the garbage collector."""
    shape = KVShape(1, 1, 4, torch.float32, torch.device("cpu"))
    pool = PagePool(shape, 2**20)
    context = DeviceContext(shape, pool)
    context.make_room(640)
    slab = weakref.ref(context.whole[0].slab)
    gc.disable()
    try:
        pool.shrink()
        assert slab() is not None
        del context
        pool.shrink()
        assert slab() is None
    finally:
        gc.enable()
    assert pool.num_bytes == 0
