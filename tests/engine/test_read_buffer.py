"""Rows that come to a buffer on the device before a request's turn: the same code on the CPU, given a buffer there."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine import hardware, runner, setup, sizes
from afterglow.engine.gather import Gatherer
from afterglow.engine.kv_shape import KVShape
from afterglow.engine.read_buffer import DeviceReadBuffer
from afterglow.engine.stats import GatherCounters
from afterglow.kernels.context_pages import Pages
from afterglow.kernels.slot_gather import SlotGather
from afterglow.model.presets import PRESETS
from afterglow.plan.step import Gather, RowsAhead, Run, Step
from afterglow.request import Output, Request, SamplingParams
from tests.engine.conftest import FAMILIES, VOCAB, Handle, in_turn, submit_at_once
from tests.engine.test_exact_reuse import same
from tests.engine.test_gather import Marks
from tests.waiting import wait_for

Start = Callable[..., Handle]
Models = Callable[[str], Path]
MiB = 2**20


def give_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines on the CPU have the buffer that they would have on CUDA, and gather ahead."""
    sized = sizes.read_buffer_bytes

    def read_buffer_bytes(config: EngineConfig, decoder: Any, budget: int) -> int:
        seen = SimpleNamespace(spec=decoder.spec, dtype=decoder.dtype, device=torch.device("cuda"))
        return sized(config, seen, budget)  # type: ignore[arg-type]

    monkeypatch.setattr(sizes, "read_buffer_bytes", read_buffer_bytes)
    monkeypatch.setattr(runner, "Gatherer", partial(Gatherer, ahead=2))


def in_line(handle: Handle, first: list[int], second: list[int], cancel: bool = False) -> None:
    """Ask for two replies; the second waits until the first has ended. `cancel`: it is cancelled after the first one's second token."""
    ended: list[str] = []
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    drawn = []

    def told(output: Output) -> None:
        drawn.append(output.request_id)
        if cancel and drawn.count("first") == 2:
            handle.engine.cancel("second")
        if output.finish_reason is not None:
            ended.append(output.request_id)

    asked = {"first": first, "second": second}
    submit_at_once(handle.engine, [(Request(name, prompt, sampling), told) for name, prompt in asked.items()])
    wait_for(lambda: len(ended) == 2, 60)


@pytest.mark.parametrize("family", in_turn(FAMILIES))
def test_replies_are_those_without_a_buffer(
    start: Start, model_of: Models, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    give_buffers(monkeypatch)
    rng = random.Random(family)
    handle = start(model_of(family), max_batch=1, speculate="off")
    windowed = handle.engine.parts.decoder.spec.window is not None
    for length in (70, 200):
        history = [rng.randrange(VOCAB) for _ in range(length)]
        handle.ask(history, max_tokens=20)
        handle.engine.settle()
        handle.engine.demote("host")
        prompt = history + [rng.randrange(VOCAB) for _ in range(9)]
        before = handle.engine.stats().engine.gather
        others = [(history[0] + 1) % VOCAB, *(rng.randrange(VOCAB) for _ in range(30))]
        in_line(handle, others, prompt)
        after = handle.engine.stats().engine.gather
        assert (after.ahead_used > before.ahead_used) == (not windowed)
        assert after.ahead_used == after.ahead_read
        handle.engine.demote("device")
        handle.engine.settle()
        reused = handle.ask(prompt, max_tokens=4)
        same(reused, handle.ask(prompt, reuse=False, max_tokens=4))


@pytest.mark.parametrize("options", [{"kv_dtype": "int8"}, {"kv_dtype": "bfloat16"}, {"read_buffer": 1}, {}])
@pytest.mark.parametrize("cancel", [False, True])
def test_tokens_with_and_without_a_buffer(
    start: Start, model_of: Models, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], cancel: bool
) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(rows)] for rows in (130, 90, 30)]
    more = [rng.randrange(VOCAB) for _ in range(5)]
    replies = []
    for buffered in (False, True):
        if buffered:
            give_buffers(monkeypatch)
        handle = start(model_of("llama"), max_batch=1, speculate="off", **options)
        for prompt in prompts[:2]:
            handle.ask(prompt)
        handle.engine.settle()
        handle.engine.demote("host")
        in_line(handle, prompts[2], [*prompts[0], *more], cancel)
        replies.append([handle.ask([*prompt, *more]).tokens for prompt in prompts])
        counted = handle.engine.stats().engine.gather
        assert (counted.ahead_read > 0) == buffered
        assert (counted.ahead_used > 0) == (buffered and not cancel)
    assert replies[0] == replies[1]


# ------------------------------------------------------------------------------------------------ the buffer alone


SHAPE = KVShape(3, 1, 4, torch.float32, torch.device("cpu"))
AHEAD = RowsAhead(1, 2, (Gather("x", 5, 64, (1, 0), None), Gather("y", 0, 20, (2,), None)), 2)


def buffer_of(arena: torch.Tensor) -> DeviceReadBuffer:
    return DeviceReadBuffer(arena, SHAPE, 2 * 2 * 128 * 4 * 4, GatherCounters())


def run_with(gathers: tuple[Gather, ...]) -> Run:
    return Run(1, 2 + sum(each.stop - each.start for each in gathers), (7,), True, 128, None, gathers)


def test_rows_come_out_as_they_lie_in_their_slots() -> None:
    arena = torch.randn(3, 2, 4, 64, 1, 4)
    buffer = buffer_of(arena)
    buffer.hold(AHEAD, None)
    assert buffer.layers_of(2, AHEAD.gathers) == 2
    pages = Pages.of(torch.zeros(3, 2, 1, 128, 4))
    buffer.put(1, pages, 1, 2, 81)
    expected = torch.cat([arena[1, :, 1, 5:], arena[1, :, 2, :20]], 1)
    assert torch.equal(torch.stack(pages.read(1, 2, 81)), expected)
    assert not any(part.any() for part in pages.read(1, 0, 2))
    buffer.put(0, pages, 0, 50, 81)  # the rows before have come to the device meanwhile
    assert torch.equal(torch.stack(pages.read(0, 50, 81)), torch.cat([arena[0, :, 1, 53:], arena[0, :, 2, :20]], 1))


def test_what_is_there_is_not_copied_again_and_other_rows_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    monkeypatch.setattr(SlotGather, "put", lambda self, stored, pages, layer, rotation, least: copied.append(layer))
    buffer = buffer_of(torch.zeros(3, 2, 4, 64, 1, 4))
    buffer.hold(AHEAD, None)
    buffer.hold(AHEAD._replace(gathers=AHEAD.gathers), None)
    assert copied == [0, 1]
    assert buffer.layers_of(0, AHEAD.gathers) == 0
    assert buffer.layers_of(2, (AHEAD.gathers[0],)) == 0
    assert buffer.layers_of(2, (AHEAD.gathers[0]._replace(slots=(3, 0)), AHEAD.gathers[1])) == 0
    buffer.hold(AHEAD._replace(layers=1, gathers=AHEAD.gathers[:1]), None)
    assert copied == [0, 1, 0]


def test_copies_are_waited_for_just_where_their_slots_are_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = Marks()
    monkeypatch.setattr(torch, "get_device_module", lambda device: marks)
    buffer = buffer_of(torch.zeros(3, 2, 4, 64, 1, 4))
    buffer.keep(Step(1))
    buffer.hold(AHEAD, None)
    buffer.keep(Step(2, ahead=AHEAD))
    buffer.keep(Step(3, runs=(run_with(AHEAD.gathers),)))
    assert marks.said == ["mark"]
    buffer.keep(Step(4, runs=(run_with(AHEAD.gathers[:1]),)))
    assert marks.said == ["mark", "wait"]
    assert buffer.layers_of(2, AHEAD.gathers) == 0
    buffer.keep(Step(5))
    assert marks.said == ["mark", "wait"]
    buffer.hold(AHEAD, None)
    buffer.hold(AHEAD._replace(layers=1), None)  # perhaps the job that was to take the rows had no memory
    assert marks.said == ["mark", "wait", "mark", "mark"], (
        "this step's moves have begun: the next one's are kept waiting"
    )
    buffer.keep(Step(6, ahead=AHEAD._replace(layers=1)))
    assert marks.said == ["mark", "wait", "mark", "mark", "wait"]


def test_a_lack_of_memory_leaves_fewer_layers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def put(self: SlotGather, stored: object, pages: Pages, layer: int, *others: object) -> None:
        if layer:
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")

    monkeypatch.setattr(SlotGather, "put", put)
    buffer = buffer_of(torch.zeros(3, 2, 4, 64, 1, 4))
    buffer.hold(AHEAD, None)
    assert buffer.layers_of(2, AHEAD.gathers) == 1
    assert "no memory to read the next request's rows ahead" in caplog.text
    buffer.keep(Step(1))


# ---------------------------------------------------------------------------------------------------- its rate


def test_the_rate_is_that_of_the_fastest_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 4.0, 5.0, 5.5, 6.0, 8.0, 9.0, 10.0])
    monkeypatch.setattr(hardware, "now_on", lambda device: next(times))
    assert hardware.copy_rate(torch.zeros(1000, dtype=torch.uint8), torch.device("cpu")) == 2000
    assert hardware.copy_rate(torch.zeros(0, dtype=torch.uint8), torch.device("cpu")) == 0
    assert next(times, None) is None


def test_the_plan_is_told_the_rate_in_rows_where_there_is_a_buffer(
    start: Start, model_of: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def copy_rate(host: torch.Tensor, device: torch.device) -> float:
        copied.append(len(host))
        return 1e6 if len(host) else 0.0

    monkeypatch.setattr(setup, "copy_rate", copy_rate)
    assert start(model_of("llama")).engine.parts.capacity.read_row_seconds == 0
    give_buffers(monkeypatch)
    parts = start(model_of("llama"), kv_dtype="bfloat16").engine.parts
    assert copied == [0, parts.sizes.read_buffer_bytes]
    layers = parts.decoder.spec.layers
    assert parts.capacity.read_row_seconds == pytest.approx(parts.sizes.device_row_bytes / 2 / layers / 1e6)


# ---------------------------------------------------------------------------------------------------- its size


def size_of(budget: int = 16 * MiB, device: str = "cuda", window: int | None = None, **options: Any) -> int:
    """The size for the tiny preset: 256 bytes for a row of a layer, two layers."""
    cache = {name: options.pop(name) for name in list(options) if name in CacheConfig.__dataclass_fields__}
    spec = replace(PRESETS["tiny"], window=window)
    decoder: Any = SimpleNamespace(spec=spec, dtype=torch.float32, device=torch.device(device))
    return sizes.read_buffer_bytes(EngineConfig(cache=CacheConfig(**cache), **options), decoder, budget)


def test_it_has_a_sixteenth_of_the_devices_budget_in_whole_blocks() -> None:
    assert size_of() == MiB
    assert size_of(17 * MiB - 1) == 67 * 64 * 256
    assert size_of(64 * 1024 * MiB) == 1024 * MiB


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cpu"},
        {"window": 100},
        {"read_buffer": 0},
        {"preload": "whole"},
        {"reuse": False},
        {"max_model_len": 30721},  # in 16 MiB there is room for 32,768
        {"budget": 256 * 512},
    ],
)
def test_there_is_none(options: dict[str, Any]) -> None:
    assert size_of(**options) == 0


def test_the_longest_context_that_was_asked_for_fits_beside_it() -> None:
    assert size_of(max_model_len=30720) == MiB


def test_contexts_and_the_buffer_share_the_budget(
    start: Start, model_of: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = start(model_of("llama"), max_model_len=64).engine.parts.sizes
    give_buffers(monkeypatch)
    parts = start(model_of("llama"), max_model_len=64).engine.parts
    assert parts.sizes.context_bytes + parts.sizes.read_buffer_bytes == whole.context_bytes
    assert parts.capacity.read_buffer_rows * parts.sizes.device_row_bytes == 2 * parts.sizes.read_buffer_bytes
    assert parts.capacity.device_rows * parts.sizes.device_row_bytes <= parts.sizes.context_bytes
