"""Layers with a sliding window hold the last rows of a context alone: the memory follows the windows, and no answer changes.

Expected answers come from an engine whose layers hold all rows. Every row of a context that has not been written is NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from afterglow.engine.context import DeviceContext
from afterglow.engine.kv_shape import KVShape
from afterglow.engine.page_pool import PagePool
from afterglow.kernels import decode
from afterglow.plan import options
from afterglow.plan.options import Capacity, Held, SchedulerOptions
from afterglow.plan.stats import Counters
from afterglow.plan.tiers.device import Device
from afterglow.request import Completion, Request, SamplingParams
from tests import doors
from tests.engine.conftest import FAMILIES, VOCAB, Handle, in_turn, write_model
from tests.engine.test_exact_reuse import same
from tests.engine.test_windows import LONG

Start = Callable[..., Handle]

WHOLE = 2**20  # a chunk beside which no layer gives up rows
CHUNK = 32
MIXED = {**FAMILIES["gemma3_text"], "num_hidden_layers": 3, "layer_types": LONG["layer_types"], "head_dim": 16}
# One layer of two, or of three, holds all rows; in mistral none does. A cap, sinks, and heads that the kernels do not take.
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": MIXED,
    "narrow": {**MIXED, "head_dim": 8},
    "gemma2": FAMILIES["gemma2"],
    "gpt_oss": FAMILIES["gpt_oss"],
    "mistral": FAMILIES["mistral-window"],
}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    doors.fill_new_contexts(monkeypatch, torch.nan)
    doors.check_each_budget(monkeypatch)
    monkeypatch.setattr(options, "STEP", CHUNK)


@pytest.fixture
def pair(start: Start, tmp_path: Path) -> Callable[..., tuple[Handle, Handle]]:
    """An engine under test, and one whose contexts are whole."""

    def make(family: str, **options: Any) -> tuple[Handle, Handle]:
        model = write_model({**MODELS[family], "max_position_embeddings": 2048}, tmp_path / "model")
        return (
            start(model, tmp_path, **{"prefill_chunk": CHUNK, **options}),
            start(model, prefill_chunk=WHOLE, device_cache=1024**2 * 8),
        )

    return make


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def bytes_held(handle: Handle) -> int:
    return doors.held_bytes(handle.engine.parts.runner)


def given_up(handle: Handle) -> int:
    return max(int(context.recent.first) for context in doors.contexts_of(handle.engine.parts.runner))


def together(handle: Handle, prompts: list[list[int]], max_tokens: int = 6) -> list[Completion]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=VOCAB, ignore_eos=True)
    requests = [Request(f"b{i}", prompt, params) for i, prompt in enumerate(prompts)]
    return handle.engine.generate(requests)


@pytest.mark.parametrize("family", in_turn(MODELS, ("gemma3", "mistral")))
def test_turns_go_on_from_every_tier(pair: Callable[..., tuple[Handle, Handle]], family: str) -> None:
    window = MODELS[family]["sliding_window"]
    rng = random.Random(family)
    handle, whole = pair(family)
    text = words(rng, 700)
    for turn, tier in enumerate(("device", "host", "disk", "device")):
        done = handle.ask(text, max_tokens=8)
        same(done, whole.ask(text, reuse=False, max_tokens=8))
        handle.engine.settle()
        assert given_up(handle) > 0
        if tier != "device":
            handle.engine.demote(tier)  # type: ignore[arg-type]
        text = [*text, *done.tokens, *words(rng, 60)]
        found = handle.ask(text, max_tokens=8)
        same(found, whole.ask(text, reuse=False, max_tokens=8))
        assert getattr(found.cached, tier) >= len(text) - 61
        for back in (3, 100, window + 600):  # to rows whose windows are on the device, or not
            other = [*text[:-back], (text[-back] + 1) % VOCAB, *words(rng, 5)]
            found = handle.ask(other)
            same(found, whole.ask(other, reuse=False))
            assert found.cached.total >= len(text) - back
            assert back > 3 or found.cached.device > 0
            assert back < 600 or turn > 0 or found.cached.device == 0, "later there are contexts of what follows"
    handle.engine.parts.scheduler.check()


@pytest.mark.parametrize("built", [True, False])
def test_requests_of_mixed_lengths_share_what_they_hold(
    pair: Callable[..., tuple[Handle, Handle]], built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not built:
        monkeypatch.setattr(decode, "native", lambda: None)
    rng = random.Random(7)
    handle, whole = pair("gemma3", relay="on", max_batch=8)
    head = words(rng, 500)
    prompts = [[*head, *words(rng, extra)] for extra in (4, 90, 300, 700)] + [words(rng, 20)]
    expected = [whole.ask(prompt, reuse=False, max_tokens=6) for prompt in prompts]
    for tier in ("device", "host", "disk"):
        for done, wanted in zip(together(handle, prompts), expected, strict=True):
            same(done, wanted)
        handle.engine.settle()
        assert given_up(handle) > 0
        if tier != "disk":
            handle.engine.demote("host" if tier == "device" else "disk")
    assert handle.engine.stats().engine.relay.groups > 0


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_reply_outgrows_what_layers_hold(pair: Callable[..., tuple[Handle, Handle]], mode: str) -> None:
    """Rows are given up while it is generated, once and again, with guesses and without."""
    prompt = words(random.Random(1), 40) * 5
    handle, whole = pair("gemma3", speculate=mode)
    done = handle.ask(prompt, max_tokens=450)
    same(done, whole.ask(prompt, reuse=False, max_tokens=450))
    assert given_up(handle) >= 512


def test_requests_that_push_each_other_out_go_on(pair: Callable[..., tuple[Handle, Handle]]) -> None:
    rng = random.Random(3)
    handle, whole = pair("gemma3", device_cache=1024 * 640 * 2, max_batch=4)
    prompts = [words(rng, 600) for _ in range(4)]
    expected = [whole.ask(prompt, reuse=False, max_tokens=400) for prompt in prompts]
    for done, wanted in zip(together(handle, prompts, 400), expected, strict=True):
        same(done, wanted)
    assert handle.engine.stats().plan.counters.preemptions > 0


def test_memory_of_a_long_context_follows_the_windows(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8,000 tokens, and a window of 1,024 in two of three layers."""
    monkeypatch.setattr(options, "STEP", 512)
    row = 2 * 2 * 16 * 4  # bytes in one layer
    model = write_model(LONG, tmp_path / "model")
    handle = start(model, host_cache=1024**2 * 64, device_cache=3 * row * 16384)
    for number in range(3):  # whole, two would have room
        handle.ask(words(random.Random(number), 8000), max_tokens=1)
    handle.engine.settle()
    contexts = doors.contexts_of(handle.engine.parts.runner)
    assert len(contexts) == 3
    for context in contexts:
        assert len(context.whole) == 8000 // 64
        assert len(context.recent) <= (1024 + 256 + 512) // 64
    stats = handle.engine.stats()
    assert bytes_held(handle) <= stats.tiers.device.used


# ---------------------------------------------------------------------------------------------- the context itself


@pytest.mark.parametrize("seed", range(30))
def test_a_context_holds_what_a_whole_one_does(seed: int) -> None:
    """Steps of random lengths, growth, shared beginnings and shorter ones: the rows held are those of a context that keeps all. In the
    end every page is free again."""
    rng = random.Random(seed)
    windowed = tuple(layer for layer in range(3) if rng.random() < 0.6) or (1,)
    rows = Held(3, len(windowed), rng.choice([150, 300]), rng.choice([1, 64]))
    window = rng.randint(1, 60)
    shape = KVShape(3, 2, 4, torch.float32, torch.device("cpu"), windowed, rows)
    plain = KVShape(3, 2, 4, torch.float32, torch.device("cpu"))
    pool = PagePool(shape, 2**30)
    context, whole = DeviceContext(shape, pool), DeviceContext(plain, PagePool(plain, 2**30))
    others: list[tuple[DeviceContext, list[tuple[torch.Tensor, ...]], int]] = []

    def held(each: DeviceContext, first: int, stop: int) -> list[tuple[torch.Tensor, ...]]:
        return [each.read(layer, max(first, each.pages(layer).first), stop) for layer in range(3)]

    while context.rows < 1000:
        start = context.rows
        stop = start + rng.randint(1, min(60, rows.step(start, window)))
        for each in (context, whole):
            each.make_room(stop)
        for layer in range(3):
            new = torch.randn(2, stop - start, 2, 4)
            for each in (context, whole):
                each.write(layer, start, *new)
        context.rows = whole.rows = stop
        if rng.random() < 0.2:
            before, context = context, DeviceContext(shape, pool)
            context.share(before, stop)
            others.append((before, held(before, 0, stop), stop))
            assert len(windowed) == 3 or stop < 64 or context.whole[0] is before.whole[0]
        if rng.random() < 0.2:  # guesses were wrong, or another turn goes on from an earlier row
            context.cut(max(start + 1, stop - 2))
            whole.rows = context.rows
        for layer in range(3):
            first = context.pages(layer).first
            assert first <= max(0, context.rows + 1 - window)
            assert layer in windowed or first == 0
            for found, expected in zip(
                context.read(layer, first, context.rows), whole.read(layer, first, context.rows), strict=True
            ):
                assert torch.equal(found, expected)
    for other, expected_rows, stop in others:  # nothing was written into a page that others hold
        for of_layer, wanted in zip(held(other, 0, stop), expected_rows, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(of_layer, wanted, strict=True))
    with pytest.raises(AssertionError, match="not held"):
        context.read(windowed[0], context.pages(windowed[0]).first - 1, context.rows)
    used = pool.num_bytes
    del context, others, other, before, each
    assert doors.free_bytes_of(pool) == used


def test_slabs_that_are_not_used_make_room_for_the_other_kind() -> None:
    """A pool keeps its limit whichever contexts there are."""
    shape = KVShape(3, 2, 64, torch.float32, torch.device("cpu"), (0, 2), Held(3, 2, 256))
    size = 2 * 2 * 64 * 64 * 4  # bytes of a page of one layer
    pool = PagePool(shape, 96 * size)
    short = [DeviceContext(shape, pool) for _ in range(32)]
    for each in short:
        each.make_room(64)
    assert 0 <= pool.num_bytes - 96 * size <= 3 * 16 * size, "but for what is free in a slab of each kind"
    del each, short
    long = DeviceContext(shape, pool)
    for stop in range(64, 80 * 64, 64):
        long.make_room(stop)
        long.rows = stop
    assert 0 <= pool.num_bytes - 96 * size <= 3 * 16 * size


def test_pages_of_one_kind_move_together_to_make_room_for_the_other() -> None:
    """Short contexts fill the pool; of each slab a page stays. A long one then needs most of the memory for pages of the other kind."""
    shape = KVShape(3, 2, 64, torch.float32, torch.device("cpu"), (0, 2), Held(3, 2, 256))
    size = 2 * 2 * 64 * 64 * 4  # bytes of a page of one layer
    limit = 384 * size
    pool = PagePool(shape, limit)
    short = [DeviceContext(shape, pool) for _ in range(128)]
    for number, each in enumerate(short):
        each.make_room(64)
        for layer in range(3):
            each.write(layer, 0, *torch.full((2, 64, 2, 64), float(number)))
        each.rows = 64
    slabs = {page.slab for each in short for pages in (each.whole, each.recent) for page in pages or ()}
    largest = 2 * max(slab.data.nbytes for slab in slabs)  # one of each kind
    assert limit <= pool.num_bytes <= limit + largest
    kept = {number: short[number] for number in range(0, 128, 20)}
    sharing = DeviceContext(shape, pool)
    sharing.share(kept[20], 64)
    del each, short
    pool.shrink()
    held = pool.num_bytes
    assert held > limit // 2, "no slab is empty"
    long = DeviceContext(shape, pool)
    for stop in range(64, 340 * 64, 64):
        long.make_room(stop)
        long.rows = stop
        assert pool.num_bytes <= limit + largest
    for number, context in [*kept.items(), (20, sharing)]:
        assert context.whole[0].users == 1 + (number == 20)
        for layer in range(3):
            assert context.read(layer, 0, 64)[0].unique().tolist() == [number]
            assert context.read(layer, 0, 64)[1].unique().tolist() == [number]
            assert context.pages(layer).offsets(0, 64, context.pages(layer).data) == [0]
    del context, kept, sharing, long
    pool.shrink()
    assert pool.num_bytes == 0


def test_rows_that_a_window_shows_would_not_fit() -> None:
    capacity = Capacity(128, 0, layers=2, window_layers=1, window_rows=12, window_stride=4)
    Device(capacity, Counters(), SchedulerOptions(sliding_window=7))
    with pytest.raises(ValueError, match="a window of 8 rows does not fit the 12"):
        Device(capacity, Counters(), SchedulerOptions(sliding_window=8))


def test_a_slab_is_touched_before_it_is_needed() -> None:
    """Where fewer than 16 pages are free."""

    class Toucher:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def start(self, memory: list[Any], done: object) -> None:
            self.sizes += [each.nbytes for each in memory]

    shape, toucher = KVShape(2, 2, 64, torch.float32, torch.device("cpu")), Toucher()
    page = 2 * 2 * 2 * 64 * 64 * 4
    pool = PagePool(shape, 2048 * page, toucher)  # type: ignore[arg-type]
    pool.prepare(2)
    context = DeviceContext(shape, pool)
    context.make_room(240 * 64)
    assert toucher.sizes == [256 * page]
    context.make_room(241 * 64)
    assert toucher.sizes == [256 * page] * 2
    assert doors.free_bytes_of(pool) == 256 * page + 15 * page
