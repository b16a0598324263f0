"""The tier that is slow on purpose: right bytes, when it says, by a clock of the tests' own; never sooner by the real."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest

from afterglow.errors import ConfigError, StoreError
from afterglow.plan.step import BACKGROUND, Load, Store
from afterglow.store.extents import pieces
from afterglow.store.extents import throttle as throttle_module
from afterglow.store.extents.chunks import BEGUN, LEFT_OUT, TAKEN_BACK, WANTED, ChunkRead, ExtentChunks
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.extents.layout import KVLayout
from afterglow.store.extents.throttle import UNDER_WAY, ArtificiallySlowTier, Line, Throttle
from afterglow.store.extents.tier import ExtentRead
from afterglow.store.moving.task import Abandoned
from tests import doors
from tests.store import test_tiers
from tests.store.store_kit import (
    ALIGNED,
    DIGEST,
    ODD,
    Kit,
    arena_of,
    contents,
    extent_name,
    limit_reads,
    patch_reads,
    record,
)


def slow(folder, layout=ALIGNED, **speeds):
    return ArtificiallySlowTier(DiskTier(folder / "extents", layout, DIGEST), Throttle(**speeds))


class TestThrottled(test_tiers.TestDisk):
    """The contract of all tiers; what only a DiskTier has is asked of the tier inside."""

    def make(self, folder):
        class Slow(ArtificiallySlowTier):
            def __getattr__(self, name):
                return getattr(self.real, name)

        disk = DiskTier(folder / "extents", self.layout, DIGEST)
        return Slow(disk, Throttle(1e9, 1e9, 1e-5))


class TestThrottledThroughABounceBuffer(TestThrottled):
    layout = ODD


@pytest.mark.parametrize("speeds", [(0, 1, 0), (1, -1, 0), (1, 1, -1), (1, 1, math.inf), (math.nan, 1, 0)])
def test_impossible_speeds(speeds):
    with pytest.raises(ConfigError, match="throttled tier"):
        Throttle(*speeds)


class Clock:
    """In place of `time` for one thread: it moves on by sleeping, and by `real` seconds at each call of preadv."""

    def __init__(self, monkeypatch, real=0.0):
        self.now = 1000.0

        def slowly(preadv):
            def call(*args):
                self.now += real
                return preadv(*args)

            return call

        patch_reads(monkeypatch, slowly)
        monkeypatch.setattr(throttle_module, "time", self)

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


LAYOUT = KVLayout(8, 2, 8, "F32")
HEAD, LAYER = LAYOUT.head_bytes(256), 2 * LAYOUT.tensor_bytes(256)


@pytest.fixture
def arena(tmp_path):
    """An arena whose first four slots are extent 1 of the folder."""
    arena = arena_of(LAYOUT, 20)
    slow(tmp_path, LAYOUT).write(record(1, 256), arena, range(4), test_tiers.ignore)
    return arena


@pytest.mark.parametrize("joined", [1, 1 << 30])
def test_each_layer_arrives_when_its_bytes_have_passed(tmp_path, arena, monkeypatch, joined):
    monkeypatch.setattr(pieces, "READ_BYTES", joined)
    tier = slow(tmp_path, LAYOUT, read_bytes_per_s=4e6, latency_s=0.5)
    clock = Clock(monkeypatch, real=0.0001)  # what the real tier needs itself is no delay on top
    start, arrivals = clock.now, []
    moved = tier.read(
        ExtentRead(extent_name(1), 256, arena, range(8, 12)), lambda n: arrivals.append((n, clock.now - start))
    )
    assert arrivals == [(n, pytest.approx(0.5 + (HEAD + n * LAYER) / 4e6)) for n in range(1, 9)]
    assert moved == LAYOUT.file_bytes(256)
    assert np.array_equal(contents(arena, range(8, 12), 256), contents(arena, range(4), 256))


def test_the_parts_of_a_load_take_the_time_of_the_whole_and_a_latency_each(tmp_path, arena, monkeypatch):
    tier = slow(tmp_path, LAYOUT, read_bytes_per_s=4e6, latency_s=0.5)
    clock = Clock(monkeypatch)
    start = clock.now
    moved = tier.read(ExtentRead(extent_name(1), 256, arena, range(8, 12)), test_tiers.ignore, 0, 3)
    assert clock.now - start == pytest.approx(0.5 + (HEAD + 3 * LAYER) / 4e6)
    clock.now += 50.0  # a line that is not used saves nothing up
    moved += tier.read(ExtentRead(extent_name(1), 256, arena, range(8, 12)), test_tiers.ignore, 3)
    assert moved == LAYOUT.file_bytes(256)
    assert clock.now - start == pytest.approx(51.0 + moved / 4e6)


def test_a_tier_that_is_slower_by_itself_is_not_held_back(tmp_path, arena, monkeypatch):
    limit_reads(monkeypatch, 1)
    tier = slow(tmp_path, LAYOUT, read_bytes_per_s=1e9, latency_s=0.5)
    clock = Clock(monkeypatch, real=2.0)
    start = clock.now
    tier.read(ExtentRead(extent_name(1), 256, arena, range(8, 12)), test_tiers.ignore)
    assert clock.now - start == 2.0 * LAYOUT.layers


def test_a_store_takes_its_time(tmp_path, arena, monkeypatch):
    tier = slow(tmp_path, LAYOUT, write_bytes_per_s=4e6, latency_s=0.5)
    clock = Clock(monkeypatch)
    start = clock.now
    steps = []
    moved = tier.write(record(2, 256), arena, range(4), lambda: steps.append(clock.now - start))
    assert moved == LAYOUT.file_bytes(256)
    assert clock.now - start == pytest.approx(0.5 + moved / 4e6)
    assert steps == sorted(steps)
    assert len(set(steps)) >= LAYOUT.layers  # a sign of life for each layer


@pytest.mark.parametrize("threads", [1, 3])
def test_loads_and_stores_share_a_line_each(tmp_path, threads):
    """By the real clock: however many threads, all together are no faster than the line."""
    speed = 3e6
    count, rows = 6, 256
    with Kit(tmp_path, threads=threads, throttle=Throttle(speed, 2 * speed, 0.001)) as kit:
        wanted = [contents(kit.store.arena, range(4 * n, 4 * n + 4), rows) for n in range(count)]
        total = count * ALIGNED.file_bytes(rows)
        start = time.perf_counter()
        kit.store.start([Store(n, record(n, rows), tuple(range(4 * n, 4 * n + 4))) for n in range(count)])
        stored = kit.settle()
        assert time.perf_counter() - start >= total / (2 * speed)
        start = time.perf_counter()
        kit.store.start(
            [Load(10 + n, extent_name(n), rows, tuple(range(24 + 4 * n, 28 + 4 * n))) for n in range(count)]
        )
        loaded = kit.settle()
        assert time.perf_counter() - start >= total / speed
        assert all(done.ok for done in stored + loaded)
        assert sum(done.bytes for done in loaded) == sum(done.bytes for done in stored) == total
        assert all(done.seconds >= done.bytes / speed for done in loaded)
        for n in range(count):
            assert np.array_equal(contents(kit.store.arena, range(24 + 4 * n, 28 + 4 * n), rows), wanted[n])


def test_the_latency_of_one_call_does_not_hold_up_another_s_bytes(monkeypatch):
    waits, go_on = threading.Event(), threading.Event()
    patient = threading.Thread(target=lambda: line.send(100, 2000.0))

    class Stuck(Clock):
        def sleep(self, seconds):
            if threading.current_thread() is patient:
                waits.set()
                assert go_on.wait(20)
            super().sleep(seconds)

    clock = Stuck(monkeypatch)
    line = Line(100.0)
    patient.start()
    assert waits.wait(20)
    assert line.send(100, clock.now) == 1001.0
    assert line.send(100, 1000.0) == 1002.0  # it could have left earlier, and stood in line
    go_on.set()
    patient.join(20)
    assert line.send(0, 0.0) == 2001.0


def test_a_store_given_up_while_it_is_held_back_leaves_nothing(tmp_path):
    tier = slow(tmp_path)
    calls = []

    def progress():
        calls.append(list(tier.extents()))
        if calls[-1]:
            raise Abandoned("enough")

    with pytest.raises(Abandoned):
        tier.write(record(1, 64), arena_of(ALIGNED, 4), (0,), progress)
    assert calls[-1] == [extent_name(1)]
    assert list(tier.extents()) == []
    with pytest.raises(StoreError):
        tier.head(extent_name(1))


def test_a_throttled_store_says_so(tmp_path, caplog):
    with Kit(tmp_path, throttle=Throttle(1e6)):
        pass
    assert "slow on purpose" in caplog.text


@pytest.mark.parametrize("urged", [False, True])
def test_a_load_that_shows_that_the_tier_is_slow_is_given_up_unless_somebody_waits(tmp_path, urged):
    size = ALIGNED.file_bytes(128)
    with Kit(tmp_path, slots=8, throttle=Throttle(read_bytes_per_s=2 * size)) as kit:  # half a second
        kit.put(1, 128, (0, 1))
        go_on, read = threading.Event(), doors.tier_of(kit.store).read
        doors.tier_of(kit.store).read = lambda *args: (go_on.wait(20), read(*args))[1]
        kit.store.start([Load(7, extent_name(1), 128, (2, 3), BACKGROUND, "probe", most_s=0.01)])
        if urged:
            kit.store.urge([7])
        go_on.set()
        (done,) = kit.settle()
        assert (done.ok, done.why) == ((True, None) if urged else (False, "slow"))
        assert 0 < done.bytes <= size
        assert (done.bytes > size // 2) == urged
        assert done.seconds >= done.bytes / (2 * size) * 0.9
        assert kit.store.stats().errors == {}
        assert kit.get(1, 128, (4, 5)).ok


def test_a_speed_that_changes_holds_from_the_next_layer_on(tmp_path, arena, monkeypatch):
    monkeypatch.setattr(pieces, "READ_BYTES", 1)
    tier = slow(tmp_path, LAYOUT, read_bytes_per_s=4e6)
    clock = Clock(monkeypatch)
    start, arrivals = clock.now, []

    def arrived(layers):
        arrivals.append(clock.now - start)
        if layers == 3:
            tier.change(Throttle(read_bytes_per_s=1e6))

    tier.read(ExtentRead(extent_name(1), 256, arena, range(8, 12)), arrived)
    before = [(HEAD + n * LAYER) / 4e6 for n in range(1, 4)]
    assert arrivals == pytest.approx([*before, *(before[-1] + n * LAYER / 1e6 for n in range(1, 6))])


CHUNKS = KVLayout(2, 4, 16, "F32", probe_heads=2)


@pytest.mark.parametrize("late", [False, True])
def test_chunks_that_are_taken_back_do_not_travel(tmp_path, monkeypatch, late):
    """Those that a device has already been asked for do."""
    arena = arena_of(CHUNKS, 20)
    rows, name = 1024, extent_name(1)
    slow(tmp_path, CHUNKS).write(record(1, rows), arena, range(16), test_tiers.ignore)
    tier = slow(tmp_path, CHUNKS, read_bytes_per_s=4e6, latency_s=0.5)
    _, (head,) = tier.real.read_chunks([ExtentChunks(name, rows, "", [])])
    clock = Clock(monkeypatch)
    states, start = bytearray(40), clock.now
    into = np.zeros((40, CHUNKS.chunk_bytes), np.uint8)
    places = [(layer, kv, first) for layer in (0, 1) for kv in (0, 1) for first in range(10)]
    reads = [ChunkRead(*at, at[2] + 1, [memory]) for at, memory in zip(places, into, strict=True)]
    sleep = clock.sleep

    def and_take_back(seconds):
        sleep(seconds)
        if clock.now - start > 0.5 and states[-1] == WANTED:
            states[UNDER_WAY + 1 :] = bytes([TAKEN_BACK]) * (40 - UNDER_WAY - 1)

    if late:
        clock.sleep = and_take_back
    else:
        states[1:] = bytes([TAKEN_BACK]) * 39
    moved, _ = tier.read_chunks([ExtentChunks(name, rows, head.edition, reads)], states)
    come = UNDER_WAY + 1 if late else 1
    assert moved == come * CHUNKS.chunk_bytes
    assert clock.now - start == pytest.approx(0.5 + moved / 4e6)
    assert into.any(axis=1).tolist() == [True] * come + [False] * (40 - come)
    assert list(states) == [BEGUN] * come + [LEFT_OUT] * (40 - come)
