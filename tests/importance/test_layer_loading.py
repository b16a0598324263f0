"""Loading in chunks, one layer ahead: SPEC's Figure 10 as an order of events, and rows that no guess can change."""

from __future__ import annotations

import errno
import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from afterglow.errors import DamageError, StoreError
from afterglow.importance import chunk_loader
from afterglow.importance.chunk_cache import ChunkCache, ChunkKey, ChunkPlacement
from afterglow.importance.chunk_loader import ChunkLoader, RowsLost
from afterglow.importance.prefix_loader import PrefixLoader
from afterglow.importance.select import Selection
from afterglow.importance.speculation import REMEMBERED, Prior
from afterglow.importance.waits import waited
from afterglow.plan.step import DEMAND, PREFETCH, Drop, Selectable
from afterglow.store.extents.chunk_reader import ChunkReader
from afterglow.store.extents.chunks import BEGUN, ChunkRead, ExtentChunks, States
from afterglow.store.extents.layout import KEYS, PROBES, VALUES, KVLayout
from afterglow.store.extents.rewriting import Ranks
from afterglow.store.moving.reading import Reading, Rewrite
from tests import doors
from tests.store.store_kit import Kit, contents, extent_name

LAYOUT = KVLayout(3, 4, 16, "F32", probe_heads=3)
FIRST, SECOND, IN_HOST = 640, 300, 200
ROWS = FIRST + SECOND - 40 + IN_HOST  # of the second extent, rows [40, 300)

Event = tuple[str, int, int, int]  # what, layer, tensor, chunks


def reads_of(asked: Sequence[ExtentChunks]) -> list[ChunkRead]:
    return [read for each in asked for read in each.reads]


class RecordingReader:
    """The store's reader; every read is told."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.events: list[Event] = []

    def read(self, asked: Sequence[ExtentChunks], priority: int) -> Reading:
        for read in reads_of(asked):
            what = {DEMAND: "demand", PREFETCH: "ahead"}[priority]
            self.events.append((what, read.layer, read.kv, read.stop - read.first))
        reading: Reading = self.real.read(asked, priority)
        return reading

    def has(self, extent: str) -> bool:
        found: bool = self.real.has(extent)
        return found

    def rewrite(self, extent: str, ranks: Ranks) -> Rewrite:
        found: Rewrite = self.real.rewrite(extent, ranks)
        return found

    def urge(self, readings: Sequence[Reading]) -> None:
        self.real.urge(readings)


class Scene:
    """Two extents on disk and one in host, and what they hold: [layers, 2, ROWS, kv_heads, head_dim]."""

    def __init__(self, kit: Kit, prior: Prior, device: int = 0, host: int = 0, chunk_rows: int = 64) -> None:
        store = kit.store
        numbers = store.arena.view.view(np.float32)  # of noise, some would be no numbers
        numbers[:] = np.random.default_rng(0).standard_normal(numbers.shape)
        slots = [tuple(range(10)), tuple(range(10, 15)), tuple(range(20, 24))]
        parts = []
        for number, (rows, at) in enumerate(zip((FIRST, SECOND, IN_HOST), slots, strict=True)):
            if kit.moves < 2:
                kit.put(number, rows, at)
            parts.append(contents(store.arena, at, rows))
        parts[1] = parts[1][:, :, 40:]
        held = np.concatenate(parts, axis=2)
        self.held = torch.from_numpy(held).view(torch.float32).view(3, 2, ROWS, 4, 16)
        self.views = (
            Selectable(extent_name(0), FIRST, 0, FIRST, ()),
            Selectable(extent_name(1), SECOND, 40, SECOND, ()),
            Selectable(extent_name(2), IN_HOST, 0, IN_HOST, slots[2]),
        )
        self.reader = RecordingReader(store.chunks)
        arena = torch.from_numpy(store.arena.view).view(torch.float32).view(3, 2, 64, 64, 4, 16)
        shelf = ChunkCache(ChunkPlacement(device, host), torch.device("cpu"))
        self.loader = ChunkLoader(
            arena,
            replace(LAYOUT, part_rows=min(64, chunk_rows)),
            self.reader,
            shelf,
            dtype=torch.float32,
            timeout=20,
            prior=prior,  # type: ignore[arg-type]
            chunk_rows=chunk_rows,
        )
        self.loader.bandwidth = 1e9
        self.loader.budget.seconds = 1.0

    def always_guess(self) -> None:
        """Guess for each layer; otherwise some go without, to find out whether guessing pays."""
        self.loader.worth.next = lambda: True  # type: ignore[method-assign]

    def select(self, layer: int, k: int = 200) -> Selection:
        """Much the same rows in each layer."""
        draw = torch.Generator().manual_seed(1)
        mean = torch.rand(ROWS, generator=draw) + 0.01 * layer * torch.rand(ROWS, generator=draw)
        ranked = mean.argsort(descending=True)[:k]
        if layer == 1:
            rows = torch.stack([ranked.roll(head)[: k // 2].sort().values for head in range(4)])
            union = rows.unique()
            return Selection("per_head", ROWS, rows, union[mean[union].argsort(descending=True)], mean, 0.1, 0.2)
        return Selection("shared", ROWS, ranked.sort().values, ranked, mean, 0.9, 0.2)

    def check(self, prefix: PrefixLoader, layer: int) -> None:
        """Check one layer against the rows that were written."""
        assert torch.equal(waited(prefix.probe_keys(layer), 20), self.held[layer, KEYS, :, :3])
        selection = self.select(layer)
        all_keys = waited(prefix.all_keys(layer), 20) if selection.kind == "per_head" else None
        self.reader.events.append(("selected", layer, 0, 0))
        keys, values = waited(prefix.take(layer, selection, all_keys), 20)
        prefix.ahead(layer, selection)
        heads = torch.arange(4)
        for found, tensor in ((keys, KEYS), (values, VALUES)):
            whole = self.held[layer, tensor]
            if selection.kind == "shared":
                assert torch.equal(found, whole[selection.rows])
            else:
                assert torch.equal(found, whole[selection.rows.T, heads])


def test_bytes_are_counted_and_their_buffers_let_go(tmp_path: Path) -> None:
    """A long reply selects anew for each token."""
    with Kit(tmp_path, LAYOUT) as kit:
        scene = Scene(kit, "none")
        begun: list[weakref.ref[Reading]] = []
        real = scene.reader.read

        def kept(*args: Any) -> Reading:
            reading = real(*args)
            begun.append(weakref.ref(reading))
            return reading

        scene.reader.read = kept  # type: ignore[method-assign]
        prefix = opened(scene)
        for layer in range(3):
            scene.check(prefix, layer)
            done = range(layer + 1)
            assert not any(prefix.reads.asked(before, kv) for before in done for kv in (KEYS, VALUES, PROBES))
        prefix.close()
        for row in range(0, FIRST, 64):
            waited(prefix.more(0, VALUES, torch.tensor([row])), 20)
        gc.collect()
        assert [reading for reading in begun if reading() is not None] == []
        heads = sum(LAYOUT.head_bytes(rows) for rows in (FIRST, SECOND))
        assert prefix.reads.bytes == scene.loader.stats.read_bytes - heads > 0


def opened(scene: Scene, views: Sequence[Selectable] | None = None) -> PrefixLoader:
    prefix = PrefixLoader(scene.loader, scene.views if views is None else views)
    waited(prefix.open(), 20)
    return prefix


def rewritten(scene: Scene) -> int:
    """Have all extents rewritten whose rows would lie otherwise; how many that are."""
    before = scene.loader.stats.reordered
    scene.loader.look()
    while scene.loader.rewriting:
        scene.loader.rewrite()
        time.sleep(0.001)
    return scene.loader.stats.reordered - before


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with Kit(tmp_path, LAYOUT) as kit:
        yield kit


@pytest.mark.parametrize("prior", ["prior", "cut", "random", "sinks", "none"])
@pytest.mark.parametrize("shelf", [0, 150_000, 200_000, 10_000_000])
def test_rows_are_what_was_written_whatever_is_guessed(kit: Kit, prior: Prior, shelf: int) -> None:
    scene = Scene(kit, prior, shelf, shelf)
    for _ in range(3):
        prefix = opened(scene)
        for layer in range(3):
            scene.check(prefix, layer)
        prefix.close()
        scene.loader.cache.placement.check()
    tally = scene.loader.stats.tally
    tally.check()
    assert (tally.predicted > 0) == (prior != "none")
    if shelf == 10_000_000:  # all that was ever wanted is there
        before = scene.loader.stats.read_bytes
        prefix = opened(scene)
        for layer in range(3):
            scene.check(prefix, layer)
        assert scene.loader.stats.read_bytes == before


@pytest.mark.parametrize("chunk_rows", [64, 128, 256])
def test_a_short_last_chunk_holds_no_more_memory_than_it_has_rows(
    kit: Kit, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of a lent buffer would hold all of the buffer, and the cache counts rows."""
    scene = Scene(kit, "none", 10_000_000, 0, chunk_rows)
    reads: list[ChunkRead] = []
    whole: list[Any] = []
    take, read = scene.loader.buffers.take, scene.reader.read
    monkeypatch.setattr(scene.loader.buffers, "take", lambda: whole.append(take()) or whole[-1])
    monkeypatch.setattr(
        scene.reader, "read", lambda asked, priority: reads.extend(reads_of(asked)) or read(asked, priority)
    )
    prefix = opened(scene)
    for layer in range(3):
        scene.check(prefix, layer)
    into = [memory for read in reads if read.kv != PROBES for memory in read.into]
    lent = [memory for memory in into if any(np.shares_memory(memory, each) for each in whole)]
    assert lent
    assert all(memory.nbytes == scene.loader.chunk_bytes for memory in lent)
    assert (len(lent) < len(into)) == (chunk_rows > 64)


@pytest.mark.parametrize("chunk_rows", [16, 32, 128, 256])
def test_chunks_may_have_other_sizes(tmp_path: Path, chunk_rows: int) -> None:
    with Kit(tmp_path, replace(LAYOUT, part_rows=min(64, chunk_rows))) as kit:
        scene = Scene(kit, "cut", 10_000_000, 0, chunk_rows)
        scene.always_guess()
        for _ in range(2):
            assert rewritten(scene) == (2 if scene.loader.importance else 0)
            prefix = opened(scene)
            for layer in range(3):
                scene.check(prefix, layer)
            prefix.close()
            cache = scene.loader.cache
            keys = [key for key in cache.placement.members("device") if key.tensor != PROBES]
            cached = [(key.chunk, len(rows)) for key in keys if (rows := cache.look(key)) is not None]
            assert max(size for _, size in cached) == chunk_rows
            assert all(size == chunk_rows or chunk_rows * chunk + size in (640, 320) for chunk, size in cached)


def test_the_next_layer_is_asked_for_while_one_computes(kit: Kit) -> None:
    """Figure 10: likely chunks, then the probe keys of the layer after, then, once the layer has selected, missing chunks."""
    scene = Scene(kit, "prior")
    scene.always_guess()
    prefix = opened(scene)
    for layer in range(3):
        scene.check(prefix, layer)
    events = scene.reader.events
    for layer in (1, 2):
        probes = [i for i, e in enumerate(events) if e[1] == layer and e[2] == PROBES]
        ahead = [i for i, e in enumerate(events) if e[:2] == ("ahead", layer) and e[2] != PROBES]
        selected = [events.index(("selected", at, 0, 0)) for at in range(layer + 1)]
        assert max(probes) < selected[layer - 1] < min(ahead) <= max(ahead) < selected[layer]
        assert layer == 1 or selected[layer - 2] < min(probes)
        assert all(events[i][0] == "ahead" for i in probes)
    assert scene.loader.stats.fallbacks == 1


def test_guesses_stay_within_what_can_be_read_meanwhile(kit: Kit) -> None:
    scene = Scene(kit, "prior")
    scene.loader.budget.seconds, scene.loader.bandwidth = 1.0, 5 * 2 * LAYOUT.chunk_bytes + 1
    scene.loader.budget.beta = 0.0
    scene.loader.took = lambda reading: None  # type: ignore[method-assign]
    prefix = opened(scene)
    scene.check(prefix, 0)
    guessed = sum(
        n for what, layer, tensor, n in scene.reader.events if (what, layer) == ("ahead", 1) and tensor != PROBES
    )
    assert guessed <= 10  # five chunks, keys and values of each


def test_where_guessing_does_not_pay_few_layers_are_guessed_for(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(kit, "prior")
    chosen: list[bool] = []
    decide = scene.loader.worth.next
    monkeypatch.setattr(scene.loader.worth, "next", lambda: chosen.append(decide()) or chosen[-1])
    for _ in range(REMEMBERED):
        scene.loader.worth.took(True, 1.0)
        scene.loader.worth.took(False, 0.0)
    for _ in range(10):
        before = len(scene.reader.events)
        prefix = opened(scene)
        for layer in range(3):
            scene.check(prefix, layer)
        prefix.close()
        ahead = {
            layer for what, layer, tensor, _ in scene.reader.events[before:] if what == "ahead" and tensor != PROBES
        }
        assert ahead == {layer for layer, guesses in enumerate(chosen[-3:]) if guesses}
    assert 0 < sum(chosen) < len(chosen) / 4


def test_guesses_that_are_not_wanted_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's one thread is about to read guesses of both extents when the layer selects rows of the first."""
    read, gate, done = ChunkReader.read, threading.Event(), set()

    def held(self: ChunkReader, asked: Sequence[ExtentChunks], states: States) -> Any:
        guessed = any(read.kv != PROBES and read.layer == 1 for read in reads_of(asked))
        if guessed:
            gate.wait(20)
        found = read(self, asked, states)
        names = [each.extent for each in asked for _ in each.reads]
        if guessed:
            done.update(name for name, state in zip(names, states, strict=True) if state == BEGUN)
        return found

    monkeypatch.setattr(ChunkReader, "read", held)
    with Kit(tmp_path, LAYOUT, threads=1) as kit:
        scene = Scene(kit, "prior")
        scene.always_guess()
        prefix = opened(scene)
        scene.check(prefix, 0)
        tally = scene.loader.stats.tally
        waited(prefix.probe_keys(1), 20)
        rows = torch.arange(100)
        work = prefix.take(1, Selection("shared", ROWS, rows, rows, None, 0.9, 0.2), None)
        reading, before = next(work), tally.cancelled
        assert before > 0
        gate.set()
        assert reading.wait(20)
        keys, values = waited(work, 20)
        assert torch.equal(keys, scene.held[1, KEYS][rows])
        assert torch.equal(values, scene.held[1, VALUES][rows])
        assert kit.settle() == []
        assert done == {extent_name(0)}
        scene.check(prefix, 2)  # a chunk that was taken back may be asked for again
        prefix.close()
        tally.check()
        assert tally.predicted == tally.prefetched + tally.cancelled


def test_guesses_end_with_their_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that no thread has begun are not read any more."""
    read, gate, first, begun = ChunkReader.read, threading.Event(), threading.Event(), []

    def held(self: ChunkReader, asked: Sequence[ExtentChunks], states: States) -> Any:
        first.set()
        gate.wait(20)
        found = read(self, asked, states)
        begun.append({each.kv for each, state in zip(reads_of(asked), states, strict=True) if state == BEGUN})
        return found

    with Kit(tmp_path, LAYOUT, threads=1) as kit:
        scene = Scene(kit, "prior")
        scene.always_guess()
        prefix = opened(scene)
        waited(prefix.probe_keys(0), 20)
        assert kit.settle() == []
        monkeypatch.setattr(ChunkReader, "read", held)
        prefix.ahead(0, scene.select(0))
        assert first.wait(20)
        prefix.close()
        gate.set()
        assert kit.settle() == []
        assert begun == [set(), {PROBES}]
        tally = scene.loader.stats.tally
        assert tally.cancelled > 0
        tally.check()


def test_a_chunk_that_does_not_come_is_said(kit: Kit) -> None:
    scene = Scene(kit, "none")
    path = kit.file(1)
    data = bytearray(path.read_bytes())
    data[LAYOUT.offset(SECOND, 2, PROBES, 1)] ^= 1
    path.write_bytes(data)
    prefix = opened(scene)
    scene.check(prefix, 0)
    with pytest.raises(RowsLost) as lost:  # once the chunk has been asked for, which may be a layer ahead
        for layer in (1, 2):
            scene.check(prefix, layer)
    assert lost.value.extent == extent_name(1)


@pytest.mark.parametrize("error", [StoreError, DamageError])
def test_what_was_important_is_forgotten_with_the_rows_alone(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, error: type[StoreError]
) -> None:
    """An error that may pass takes nothing from what is known."""
    scene = Scene(kit, "none")
    prefix = opened(scene)
    for layer in range(3):
        scene.check(prefix, layer)
    prefix.close()
    assert set(scene.loader.importance) == {extent_name(number) for number in range(3)}

    def failing(self: ChunkReader, asked: Sequence[ExtentChunks], states: States) -> Any:
        raise error("made up") from OSError(errno.EIO, "made up")

    monkeypatch.setattr(ChunkReader, "read", failing)
    with pytest.raises(RowsLost) as lost:
        opened(scene)
    assert (lost.value.extent in scene.loader.importance) == (error is StoreError)


def test_what_was_important_becomes_an_order(kit: Kit) -> None:
    scene = Scene(kit, "prior")
    prefix = opened(scene)
    for layer in range(3):
        scene.check(prefix, layer)
    first = scene.loader.stats.read_bytes
    assert rewritten(scene) == 2  # the third is in host alone; none is known to be on disk
    scene.loader.prior = "none"
    prefix = opened(scene)
    before = scene.loader.stats.read_bytes
    for layer in range(3):
        scene.check(prefix, layer)
    assert scene.loader.stats.read_bytes - before < first


@pytest.mark.parametrize("remembered", [1, 512])
@pytest.mark.parametrize("shelf", [0, 200_000, 10_000_000])
def test_an_extent_that_was_written_anew_is_not_taken_for_what_it_was(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, shelf: int, remembered: int
) -> None:
    """Its versions count from the start again, and its rows may lie in another order; also where that has been forgotten."""
    monkeypatch.setattr(chunk_loader, "MAX_EXTENTS", remembered)
    scene = Scene(kit, "none", shelf, shelf)
    scene.loader.reader = kit.store.chunks
    for turn in range(3):
        if turn:
            kit.store.start([Drop(100 + 2 * turn + number, extent_name(number)) for number in (0, 1)])
            kit.settle()
            for number, rows, slots in ((0, FIRST, range(10)), (1, SECOND, range(10, 15))):
                kit.put(number, rows, tuple(slots))
        for number, rows in ((0, FIRST), (1, SECOND)):
            draw = np.random.default_rng(10 * turn + number)
            orders = np.stack([draw.permutation(rows).astype(np.uint16) for _ in range(3)])
            kit.store.chunks.rewrite(extent_name(number), partial(np.copy, orders))  # type: ignore[union-attr]
        kit.settle()
        for _ in range(2):  # from the files, and from the shelf
            prefix = opened(scene)
            for layer in range(3):
                scene.check(prefix, layer)
            prefix.close()
        scene.loader.cache.placement.check()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_file_that_is_rewritten_while_a_prompt_reads_it(kit: Kit, at: int) -> None:
    """The layer looks at it again, and goes on: rows and answers are what they were."""
    scene = Scene(kit, "cut")
    before = opened(scene)
    for layer in range(3):
        scene.check(before, layer)
    prefix = opened(scene)
    for layer in range(3):
        if layer == at:
            assert rewritten(scene) == 2
        scene.check(prefix, layer)


def test_nothing_is_kept_of_a_file_that_is_gone_or_another_one(kit: Kit) -> None:
    """A request that goes on with rows it has read brings none back."""
    scene = Scene(kit, "none", 10_000_000, 10_000_000)
    shelf = scene.loader.cache
    prefix = opened(scene)
    scene.check(prefix, 0)
    assert sum(shelf.bytes) > 0
    for number in (0, 1):
        scene.loader.forget(extent_name(number))
    assert (shelf.bytes, len(shelf.placement), doors.cached_rows(shelf)) == ((0, 0), 0, {})
    scene.check(prefix, 1)
    scene.check(prefix, 2)
    assert (shelf.bytes, len(shelf.placement), doors.cached_rows(shelf)) == ((0, 0), 0, {})
    again = opened(scene)
    scene.check(again, 0)
    assert sum(shelf.bytes) > 0


def test_keys_that_a_fallback_reads_are_all_wanted(kit: Kit) -> None:
    """Otherwise caches by score would give them up first, to read them all again for the next request."""
    scene = Scene(kit, "none", 10_000_000, 10_000_000)
    prefix = opened(scene)
    for layer in range(3):
        scene.check(prefix, layer)
    cache, edition = scene.loader.cache.placement, doors.editions_of(prefix)[0]
    for chunk in range(FIRST // 64):
        assert cache.score(ChunkKey(extent_name(0), edition, 1, KEYS, chunk)) == 1, "layer 1 falls back"
    assert cache.score(ChunkKey(extent_name(0), edition, 0, KEYS, 0)) < 1


def test_places_are_forgotten_in_time(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(kit, "none")
    monkeypatch.setattr(chunk_loader, "MAX_LAYOUT_ROWS", 2 * ROWS)
    for views in (scene.views, scene.views[:1], scene.views[:2], scene.views, scene.views[1:]):
        prefix = opened(scene, views)
        rows = prefix.rows
        selection = Selection("shared", rows, torch.arange(rows), torch.arange(rows))
        waited(prefix.take(0, selection, None), 20)
        kept = doors.layouts_of(scene.loader).values()
        assert doors.layout_rows_of(scene.loader) == sum(len(places.number) for places in kept) <= 2 * ROWS
    assert len(kept) == 2


def test_what_has_changed_is_known_of_as_many_extents_as_importance(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is never looked at, because no file is to be rewritten."""
    monkeypatch.setattr("afterglow.importance.chunk_loader.MAX_EXTENTS", 4)
    loader = Scene(kit, "none").loader
    for number in range(20):
        loader.learn(Selectable(f"{number:040x}", 64, 0, 64, (0,)), 0, torch.ones(64))
    assert len(loader.importance) == 4
    assert doors.changed_layouts(loader).keys() == loader.importance.keys()
