"""Gathering ahead and saving through another queue, as on a CUDA device: the same code on the CPU, whose queues do
everything at once. So a layer that is gathered before it has come, or a row that is saved before it was computed, shows."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from afterglow.engine import runner
from afterglow.engine.context import DeviceContext
from afterglow.engine.gather import BatchEntry, Gatherer, HostRows
from afterglow.engine.kv_shape import KVShape
from afterglow.engine.page_pool import PagePool
from afterglow.kernels.slot_gather import SlotGather
from afterglow.plan.step import Gather
from tests.engine.conftest import FAMILIES, VOCAB, Handle, in_turn
from tests.engine.test_exact_reuse import same

Start = Callable[..., Handle]
Models = Callable[[str], Path]


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("family", in_turn(FAMILIES))
def test_queues_of_their_own_change_no_answer(
    start: Start, model_of: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, tier: str
) -> None:
    copied: list[tuple[int, int]] = []  # (layers computed, layer copied)

    class Watched(Gatherer):
        def _copy(self, entry: BatchEntry, layer: int) -> None:
            copied.append((self._computed, layer))
            super()._copy(entry, layer)

        def begin(self, *args: object) -> None:
            self._computed = 0
            super().begin(*args)  # type: ignore[arg-type]

        def computed(self, layer: int) -> None:
            self._computed = layer + 1
            super().computed(layer)

    monkeypatch.setattr(runner, "Gatherer", partial(Watched, ahead=2))
    rng = random.Random(family + tier)
    handle = start(model_of(family), tmp_path)
    for length in (70, 200):
        history = [rng.randrange(VOCAB) for _ in range(length)]
        handle.ask(history, max_tokens=20)
        handle.engine.settle()
        handle.engine.demote(tier)
        prompt = history + [rng.randrange(VOCAB) for _ in range(9)]
        reused = handle.ask(prompt, max_tokens=4)
        assert getattr(reused.cached, tier) >= length - 1
        same(reused, handle.ask(prompt, reuse=False, max_tokens=4))
    if tier == "host":  # all is there: both layers are queued before the first one is computed
        assert {(0, 0), (0, 1)} <= set(copied)


class Ending:
    """Pretend to be a store whose load ends right after a wait for it was in vain."""

    def __init__(self, well: bool) -> None:
        self.well, self.asked = well, 0

    def wait_layer(self, move: int, layer: int, timeout: float | None = None) -> bool:
        self.asked += 1
        return self.asked > 1 and self.well

    def is_under_way(self, move: int) -> bool:
        return not self.asked


@pytest.mark.parametrize("well", [True, False])
def test_a_load_that_ends_between_two_questions_has_not_failed(well: bool) -> None:
    torn = Gather("x", 0, 1, (0,), 7)
    host = HostRows(torch.empty(0), Ending(well), 1.0, torch.device("cpu"))  # type: ignore[arg-type]
    assert host.ready(torn, 0) == well
    host = HostRows(torch.empty(0), Ending(well), 1.0, torch.device("cpu"))  # type: ignore[arg-type]
    assert not host.ready(torn, 0, wait=False)
    assert host.comes(torn, 0) == well, "late, not lost"


class Marks:
    """Pretend to be a device module whose events write down what happens to them, among the copies."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.Stream, self.stream, self.current_stream = torch.cpu.Stream, torch.cpu.stream, torch.cpu.current_stream

    def Event(self) -> Marks:
        return self

    def record(self, stream: object) -> None:
        self.said.append("mark")

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.said.append("wait")


def test_copies_before_a_lack_of_memory_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read slots, which other rows may take after the step."""
    marks = Marks()

    def put(*args: object) -> None:
        if "copy" in marks.said:
            raise torch.OutOfMemoryError
        marks.said.append("copy")

    monkeypatch.setattr(torch, "get_device_module", lambda device: marks)
    monkeypatch.setattr(SlotGather, "put", put)
    arena = torch.zeros(2, 2, 1, 64, 1, 4)
    host = HostRows(arena, None, 1.0, torch.device("cpu"))  # type: ignore[arg-type]
    gatherer = Gatherer(host, 2)
    shape = KVShape(2, 1, 4, torch.float32, torch.device("cpu"))
    context = DeviceContext(shape, PagePool(shape, 2**20))
    context.make_room(65)
    entry = BatchEntry(1, slice(0, 1), 64, 65, context, (Gather("x", 0, 64, (0,), None),))
    gatherer.begin([entry], None)
    gatherer.layer(0)
    with pytest.raises(torch.OutOfMemoryError):
        gatherer.layer(1)
    gatherer.end()
    assert marks.said == ["copy", "mark", "mark", "wait"]
