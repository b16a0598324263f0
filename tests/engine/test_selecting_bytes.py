"""Bytes that selecting requests read from disk, as the system counts them: the engine's statistics, and the accounting of the
paper's Figure 9 in whole chunks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.papers.spec.accounting import Layer

from afterglow.engine.kv_format import probe_part
from afterglow.engine.selective import PrefixSelection, SelectiveAttention
from afterglow.importance.select import Force
from afterglow.importance.speculation import Prior
from afterglow.plan.tiers.cost import Cost
from afterglow.store.extents import chunk_reader
from afterglow.store.extents.layout import ALIGNMENT, align_up
from tests import doors
from tests.engine.conftest import Handle
from tests.engine.test_selecting import NEW, ask, draw, loader_of, reorder

Start = Callable[..., Handle]
Models = Callable[[str], Path]

EVEN, ODD = 230, 300  # rows of extents of 4 chunks, whose probe keys are whole pages, and of 5, whose are not


@dataclass
class Read:
    """Bytes that the system has read from extents' files, and calls."""

    bytes: int = 0
    calls: int = 0


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Read]:
    """Count what system calls bring from extents' files."""
    read, real = Read(), os.preadv

    def preadv(fd: int, buffers: Any, offset: int, *more: int) -> int:
        moved = real(fd, buffers, offset, *more)
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors"):
            read.bytes += moved
            read.calls += 1
        return moved

    with monkeypatch.context() as patch:
        patch.setattr(chunk_reader, "kernels", lambda: None)  # whose calls are not seen from here
        patch.setattr(os, "preadv", preadv)
        yield read


def totals(handle: Handle) -> tuple[int, int]:
    """Bytes of chunks that were read so far, by the store and by the importance loader."""
    stats = handle.engine.stats()
    assert stats.importance is not None
    return stats.store.chunk_read_bytes, stats.importance.read_bytes


class Scene:
    """An engine whose extents are on disk alone, and which caches no chunk. It keeps what its requests select."""

    def __init__(self, start: Start, model: Path, folder: Path, prior: Prior, force: Force, **more: Any) -> None:
        options = {"importance_exact": "never", "importance_share": 0.0, "importance_renew": 0, "reorder_interval": 0.0}
        self.handle = start(model, folder, importance=1.0, **{**options, **more})
        self.loader = loader_of(self.handle)
        self.loader.prior = prior
        self.selections: list[PrefixSelection] = []
        shared = self.handle.engine.parts.selective
        assert shared is not None
        shared.rules = replace(shared.rules, force=force)
        begin = shared.begin

        def kept(*args: Any, **named: Any) -> PrefixSelection:
            self.selections.append(begin(*args, **named))
            return self.selections[-1]

        shared.begin = kept  # type: ignore[method-assign]
        self.shared: SelectiveAttention = shared

    def put(self, prefix: list[int]) -> None:
        self.handle.ask(prefix, max_tokens=1)
        self.handle.engine.settle()
        self.handle.engine.demote("disk")

    def ask(self, prompt: list[int], retention: float, monkeypatch: pytest.MonkeyPatch) -> Read:
        """Ask, and check that both statistics are what system calls have read. Returns that."""
        engine = self.handle.engine
        engine.settle()
        before, loads = totals(self.handle), engine.stats().store.disk_reads
        with counted(monkeypatch) as read:
            ask(self.handle, prompt, retention, max_tokens=2)
            engine.settle()
        assert [after - first for after, first in zip(totals(self.handle), before, strict=True)] == [read.bytes] * 2
        assert engine.stats().store.disk_reads == loads  # no extent came as a whole
        return read

    def expected(self) -> int:
        """Count the bytes of the last request by the accounting, from its selections and the orders in the files."""
        layout, found = self.loader.layout, 0
        shape = Layer(
            kv_heads=layout.kv_heads,
            probe_heads=layout.probe_heads,
            vector_bytes=layout.row_bytes // layout.kv_heads,
        )
        last = self.selections[-1]
        disk = doors.tier_of(self.handle.engine.parts.store)
        first = 0
        for view in last.prefix.views:
            assert not view.slots
            head = disk.head(view.extent)
            stop = first + view.stop - view.start
            for layer, selection in enumerate(last.selections):
                wanted = selection.wanted()
                rows = wanted[(wanted >= first) & (wanted < stop)] - first + view.start
                order = torch.from_numpy(head.sidecar.order[layer].astype(np.int64))
                chunks = len((order.argsort()[rows] // shape.chunk).unique())
                found += shape.chunk_bytes(selection.kind, view.rows, chunks)
                found += self.beside(view.rows, probes=selection.similarity is not None)
            first = stop
        return found

    def beside(self, rows: int, probes: bool) -> int:
        """Count the bytes behind the probe keys of `rows` rows up to the end of their page, and those of the means."""
        layout = self.loader.layout
        size = layout.blocks(rows) * layout.probe_chunk_bytes
        return align_up(size) - size + layout.mean_bytes(rows) if probes else -size


@pytest.mark.parametrize("rows", [EVEN, ODD])
@pytest.mark.parametrize("force", ["pass", "fallback", "no"])
@pytest.mark.parametrize("family", ["phi", "llama"])
def test_bytes_are_those_of_the_accounting(
    start: Start,
    model_of: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    force: Force,
    rows: int,
) -> None:
    """Of phi's four heads three are probe heads. Of the llama's two both are: their keys are not read again."""
    rest = "means" if rows == ODD else "forget"
    scene = Scene(start, model_of(family), tmp_path, "none", force, importance_rest=rest)
    prefix = draw(rows, rows)
    scene.put(prefix)
    scene.ask([*prefix, *draw("first", NEW)], 0.1, monkeypatch)  # which reads the file's head too
    for retention in (0.02, 0.1, 0.5):
        read = scene.ask([*prefix, *draw(retention, NEW)], retention, monkeypatch)
        assert read.bytes == scene.expected() == scene.selections[-1].prefix.reads.bytes
    cost = scene.handle.engine.parts.scheduler.cache.cost  # by the rows alone, 0.02 and what is read in any case
    assert cost.selected_part(0.02) > Cost(2, probe_part=probe_part(scene.loader.layout)).selected_part(0.02)
    if force == "pass":
        loads = {selection.kind for selection in scene.selections[-1].selections}
        assert loads == {"shared"}


def test_bytes_of_a_chain_of_extents_in_another_order(
    start: Start, model_of: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(start, model_of("phi"), tmp_path, "none", "pass")
    first, second = draw(1, EVEN), draw(2, 130)
    prefix = [*first, *second]
    scene.put(first)
    scene.put([*first, *draw("another turn", 130)])  # so the extents stay two
    scene.put(prefix)
    asked = [*prefix, *draw(3, NEW)]
    before = [scene.ask(asked, 0.05, monkeypatch).bytes for _ in range(2)][-1]
    assert before == scene.expected()
    assert len(scene.selections[-1].prefix.views) > 1
    assert reorder(scene.handle) > 0
    after = [scene.ask(asked, 0.05, monkeypatch).bytes for _ in range(2)][-1]
    assert after == scene.expected()
    assert after < before  # the rows lie together now


@pytest.mark.parametrize("prior", ["prior", "random", "sinks"])
@pytest.mark.parametrize("family", ["phi", "llama"])
def test_wrong_guesses_are_read_on_top_and_counted(
    start: Start, model_of: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, prior: Prior
) -> None:
    scene = Scene(start, model_of(family), tmp_path, prior, "pass")
    prefix = draw(1, ODD)
    scene.put(prefix)
    scene.ask([*prefix, *draw("first", NEW)], 0.01, monkeypatch)
    for i in range(3):
        scene.loader.bandwidth, scene.loader.budget.seconds = 1e9, 1.0  # all that is guessed can be read
        tally = replace(scene.loader.stats.tally)
        read = scene.ask([*prefix, *draw(i, NEW)], 0.01, monkeypatch)
        assert read.bytes == scene.expected() + scene.loader.stats.tally.wasted - tally.wasted
    assert scene.loader.stats.tally.wasted > 0


@pytest.mark.parametrize("rows", [40, EVEN])
def test_of_whole_prefixes_no_probe_keys_are_read(
    start: Start, model_of: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Of fewer than 64 rows, and of a share that leaves none out, nothing is selected: nothing has to be asked."""
    scene = Scene(start, model_of("phi"), tmp_path, "none", "no")
    prefix = draw(rows, rows)
    scene.put(prefix)
    retention = 0.5 if rows < 64 else 0.9999
    scene.ask([*prefix, *draw(1, NEW)], retention, monkeypatch)
    read = scene.ask([*prefix, *draw(2, NEW)], retention, monkeypatch)
    assert {selection.kind for selection in scene.selections[-1].selections} == {"all"}
    assert read.bytes == scene.expected()


def test_rows_in_eight_bits_are_read_in_whole_pages(
    start: Start, model_of: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(start, model_of("phi"), tmp_path, "none", "no", kv_dtype="int8")
    prefix = draw(1, ODD)
    scene.put(prefix)
    for i in range(3):
        read = scene.ask([*prefix, *draw(i, NEW)], 0.1, monkeypatch)
        assert read.bytes % ALIGNMENT == 0


def test_the_plan_is_told_how_long_selecting_waits(
    start: Start, model_of: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(start, model_of("phi"), tmp_path, "none", "pass")
    prefix = draw(1, EVEN)
    scene.put(prefix)
    cost, told = scene.handle.engine.parts.scheduler.cache.cost, []
    monkeypatch.setattr(cost, "read_selected", lambda retention, sizes, read, waited: told.append(waited))
    tier = doors.tier_of(scene.handle.engine.parts.store)
    real = tier.read_chunks

    def slow(*args: Any) -> Any:
        time.sleep(0.05)
        return real(*args)

    monkeypatch.setattr(tier, "read_chunks", slow)
    ask(scene.handle, [*prefix, *draw(2, NEW)], 0.05, max_tokens=1)
    assert len(told) == 1
    assert told[0] >= 0.05
