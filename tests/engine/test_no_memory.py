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

from afterglow.engine import contexts, token_outputs
from afterglow.engine.context import DeviceContext
from afterglow.engine.engine import Completion, Engine
from afterglow.engine.kv_shape import KVShape
from afterglow.engine.page_pool import PagePool
from afterglow.engine.selective import PrefixSelection, SelectiveAttention
from afterglow.engine.separate_pass import SeparatePass
from afterglow.engine.tee import Tee
from afterglow.engine.token_outputs import TokenOutputs
from afterglow.errors import RequestError
from afterglow.kernels.no_memory import ran_out
from afterglow.plan.journal.replaying import replay
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.step import Admit, Run
from afterglow.request import Output, Request, SamplingParams, completion_of
from tests import doors
from tests.engine.conftest import VOCAB, Handle
from tests.engine.test_exact_reuse import same
from tests.engine.test_selecting import NEW, agree, draw, expected
from tests.engine.test_selecting_beside import Told, on_disk

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


@contextmanager
def scarce(
    owner: object, name: str, fails: Callable[[int], bool], error: type[RuntimeError] = torch.OutOfMemoryError
) -> Iterator[list[int]]:
    """Have calls of a function fail for want of memory: `fails` is asked with their number. Returns those that have."""
    real, calls, failed = getattr(owner, name), count(), list[int]()

    def called(*args: object, **more: object) -> object:
        number = next(calls)
        if fails(number):
            failed.append(number)
            raise error("CUDA error: out of memory (made up)")
        return real(*args, **more)

    with mock.patch.object(owner, name, called):
        yield failed


@contextmanager
def drawing() -> Iterator[list[Run]]:
    """Return the runs that tokens are drawn for, while that is done."""
    real, found = TokenOutputs.draw, list[Run]()

    def draw_of(self: TokenOutputs, runs: list[Run], *args: object, **more: object) -> object:
        found[:] = runs
        try:
            return real(self, runs, *args, **more)  # type: ignore[arg-type]
        finally:
            found.clear()

    with mock.patch.object(TokenOutputs, "draw", draw_of):
        yield found


def at_once(engine: Engine, prompts: list[list[int]], max_tokens: int = 20) -> list[Completion]:
    """Ask all together."""
    return [completion_of(outputs, 0.0) for outputs in outputs_of(engine, prompts, max_tokens)]


def outputs_of(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[list[Output]]:
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
    return [found[request.id] for request in requests]


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


def test_a_request_that_does_not_fit_alone_ends_none_beside_it(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(model_of("llama"), tmp_path)
    prompts = [draw("large", 200), *(draw(f"beside{i}", 70) for i in range(2))]
    wanted = [handle.ask(prompt, reuse=False, max_tokens=20) for prompt in prompts[1:]]
    with room_for(160):
        large, *others = outputs_of(handle.engine, prompts, 20)
    assert "no memory left for this request" in (large[-1].error or "")
    for ours, theirs in zip(others, wanted, strict=True):
        same(completion_of(ours, 0.0), theirs)


def test_a_run_that_is_left_out_holds_no_pages() -> None:
    shape = KVShape(1, 1, 4, torch.float32, torch.device("cpu"))
    pool = PagePool(shape, 2**24)
    held = contexts.Contexts(shape, pool)
    runs = [Run(job, 0, (1,) * rows, True, rows, Admit(None, False, 0)) for job, rows in ((1, 64), (2, 64_000))]
    for run in runs:
        held.admit(run)
        held.entry(run, slice(0, len(run.tokens)))
    before = pool.num_bytes
    held.leave_out(runs[1])
    pool.shrink()
    assert pool.num_bytes < before / 2


def test_room_that_cannot_be_had_for_a_context_is_the_same(start: Start, model_of: Models, tmp_path: Path) -> None:
    """The context of a job that joins fails before anything of the step is computed."""
    handle = start(model_of("llama"), tmp_path)
    prompts = [draw(f"c{i}", 90) for i in range(2)]
    wanted = [handle.ask(prompt, reuse=False, max_tokens=20) for prompt in prompts]
    real, made = contexts.DeviceContext, count()

    def scarce(*args: object) -> object:
        if next(made) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return real(*args)  # type: ignore[arg-type]

    with mock.patch.object(contexts, "DeviceContext", scarce):
        found = at_once(handle.engine, prompts)
    assert handle.engine.stats().plan.counters.preemptions == 1
    for ours, theirs in zip(found, wanted, strict=True):
        same(ours, theirs)


PLACES = {
    "its context": (contexts, "DeviceContext"),
    "its pages": (PagePool, "take"),
    "its selection": (SelectiveAttention, "begin"),
    "its pass": (SeparatePass, "__init__"),
    "its summary": (PrefixSelection, "summary"),
    "drawing": (token_outputs, "sample"),
    "log-probabilities": (token_outputs, "logprobs_of"),
}


@pytest.mark.parametrize("place", [*PLACES])
def test_a_request_that_selects_waits_for_memory(start: Start, model_of: Models, tmp_path: Path, place: str) -> None:
    """Wherever its memory runs out: beside another request, which goes on; alone it ends."""
    handle, prefix = on_disk(start, model_of, tmp_path)
    new, other = draw("new", NEW), draw("other", 150)
    owner, name = PLACES[place]
    fast = Told(handle, "fast", other, 40)
    fast.first()
    failed = list[int]()
    with drawing() as runs:

        def its_first(number: int) -> bool:
            """Other calls are those of the other request's steps."""
            return not failed and (owner is not token_outputs or [len(run.tokens) for run in runs] == [NEW])

        with scarce(owner, name, its_first) as failed:
            slow = Told(handle, "slow", [*prefix, *new], 3, kv_retention=0.3)
            agree(slow.end(), expected(handle, prefix, new, 0.3, 3))
            assert failed
            same(fast.end(), handle.ask(other, reuse=False, max_tokens=40))
        with scarce(owner, name, lambda number: True), pytest.raises(RequestError, match="no memory left"):
            Told(handle, "alone", [*prefix, *new], 3, kv_retention=0.3).end()
    same(handle.ask(other), handle.ask(other, reuse=False))


def test_a_repeated_step_lets_tokens_select_anew_as_often(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle, prefix = on_disk(start, model_of, tmp_path, importance_renew=3, speculate="off")
    asked = [*prefix, *draw("new", NEW)]
    wanted = Told(handle, "before", asked, 30, kv_retention=0.3).end()
    handle.engine.settle()
    handle.engine.demote("disk")
    slow = Told(handle, "slow", asked, 30, kv_retention=0.3)
    slow.first()
    with (
        drawing() as runs,
        scarce(token_outputs, "logprobs_of", lambda number: len(runs) > 1 and number % 2 == 0) as failed,
    ):
        others = [Told(handle, f"other {i}", draw(f"o{i}", 9), 4) for i in range(4)]
        for each in others:
            each.end()
        found = slow.end()
    assert len(failed) >= 3
    same(found, wanted)
    assert found.selected is not None
    assert wanted.selected is not None
    assert found.selected.renewals == wanted.selected.renewals > 5


def are_reused_from_disk(handle: Handle, prompts: list[list[int]], replies: list[Completion]) -> None:
    """The next turn of each has most rows from disk, and the reply that it has without reuse."""
    handle.engine.settle()
    handle.engine.demote("disk")
    for prompt, reply in zip(prompts, replies, strict=True):
        turn = [*prompt, *reply.tokens, *draw("next", 9)]
        again = handle.ask(turn)
        assert again.cached.disk >= 64
        same(again, handle.ask(turn, reuse=False))


@pytest.mark.parametrize("speculate", ["on", "off"])
def test_a_step_without_memory_for_what_follows_its_draws_draws_the_same_again(
    start: Start, model_of: Models, tmp_path: Path, speculate: str
) -> None:
    """Seeded tokens with penalties, guesses that are wrong, and the rows that are saved are those of steps that do not fail."""
    handle = start(model_of("llama"), tmp_path / "cache", speculate=speculate)
    prompts = [[*draw(f"d{i}", 30), *draw(f"d{i}", 30)] for i in range(3)]
    hows = [
        SamplingParams(max_tokens=30, temperature=0.9, seed=i, logprobs=VOCAB, ignore_eos=True, **more)  # type: ignore[arg-type]
        for i, more in enumerate(
            ({"repetition_penalty": 1.3}, {"frequency_penalty": 0.7, "min_tokens": 9}, {"top_p": 0.5})
        )
    ]

    def replies(reuse: bool) -> list[Completion]:
        requests = [
            Request(f"m{next(_ids)}", prompt, how, reuse=reuse) for prompt, how in zip(prompts, hows, strict=True)
        ]
        return handle.engine.generate(requests)

    wanted = replies(reuse=False)
    with (
        drawing() as runs,
        scarce(token_outputs, "logprobs_of", lambda number: len(runs) > 1 and number % 4 == 2) as failed,
    ):
        found = replies(reuse=True)
    assert len(failed) >= 3
    for ours, theirs in zip(found, wanted, strict=True):
        same(ours, theirs)
    are_reused_from_disk(handle, prompts, found)


def test_rows_leave_where_the_device_has_no_memory_to_copy_them(
    start: Start, model_of: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handle = start(model_of("llama"), tmp_path / "cache")
    prompts = [draw(f"l{i}", 40 + 9 * i) for i in range(3)]
    short = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory (made up)"))
    with doors.lanes_copied_by(short):
        found = at_once(handle.engine, prompts, 50)
    assert caplog.text.count("rows leave the device one layer after the other") >= 9
    are_reused_from_disk(handle, prompts, found)


def test_memory_that_runs_out_has_other_names(start: Start, model_of: Models, tmp_path: Path) -> None:
    """Locked memory, libraries, and Triton's programs; other errors end the engine as before."""
    for text in (
        "CUDA error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
    ):
        assert ran_out(RuntimeError(text))
    assert not ran_out(RuntimeError("CUDA error: an illegal memory access was encountered"))
    handle = start(model_of("llama"), tmp_path)
    prompts = [draw(f"n{i}", 90) for i in range(2)]
    wanted = [handle.ask(prompt, reuse=False, max_tokens=20) for prompt in prompts]
    with scarce(Tee, "layer", lambda number: number == 1, RuntimeError) as failed:
        found = at_once(handle.engine, prompts)
    assert failed == [1]
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
