"""The shared tier over objects in memory: loads follow fetches layer by layer, and whatever fails leaves nothing behind."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from afterglow.plan.prefix.published import Published, listed_under
from afterglow.plan.retention import shared_room
from afterglow.plan.step import Load, MoveDone
from afterglow.store.extents.layout import KVLayout
from afterglow.store.shared import budget, extent_publisher, fetcher, remote
from afterglow.store.shared.counters import SharedCounters
from afterglow.store.shared.finder import Prompt, SharedExtent
from afterglow.store.shared.objects import Listed
from afterglow.store.shared.paths import Paths
from afterglow.store.shared.remote import KEPT_THREADS, KeptThreads, Remote
from afterglow.store.shared.shared_store import SharedStore
from tests import doors
from tests.store.store_kit import ALIGNED, EIGHT_BITS, ODD, Kit, contents, extent_name, record
from tests.waiting import wait_for

LAYOUT = KVLayout(4, 2, 8, "F32")
ROWS, SOURCE, TARGET = 100, (0, 1), (10, 12)


class Memory:
    """Objects in a dict. `gets`: what was read, in order. `gate`: reads from the byte `gated` on wait for it. `broken`: a read from
    this byte on fails. `fail`: what the next calls raise.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.written: list[str] = []
        self.gets: list[tuple[str, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.gated = 0
        self.broken: int | None = None
        self.fail: list[Exception] = []
        self.warmed = (
            threading.Event()
        )  # the listing of nothing is over with which a store is opened, in the background

    def _call(self) -> None:
        if self.fail:
            raise self.fail.pop(0)

    def get(self, path: str, start: int, length: int) -> bytes:
        self.gets.append((path, start))
        if start >= self.gated:
            assert self.gate.wait(20)
        if start == self.broken:
            raise ConnectionResetError("cut off")
        self._call()
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][start : start + length]

    def put(self, path: str, data: bytes, *, replace: bool = False) -> bool:
        self._call()
        if path in self.objects and not replace:
            return False
        self.objects[path] = data
        self.written.append(path)
        return True

    def list(self, prefix: str) -> Iterator[list[Listed]]:
        self._call()
        if prefix.endswith("0" * 40):
            self.warmed.set()
        now = time.time()
        yield [Listed(path, len(data), now) for path, data in [*self.objects.items()] if path.startswith(prefix)]

    def delete(self, path: str) -> None:
        self._call()
        self.objects.pop(path, None)


class Sharing(Kit):
    """A kit over shared objects."""

    def __init__(self, folder: Path, objects: Memory, layout: KVLayout = LAYOUT, **more: object) -> None:
        self.objects = objects
        super().__init__(
            folder, layout, slots=32, open_shared=lambda disk: SharedStore(lambda: objects, disk, 1 << 30), **more
        )

    @property
    def shared(self) -> SharedStore:
        assert self.store.shared is not None
        return self.store.shared

    def share(self, number: int, rows: int = ROWS) -> str:
        """Store noise as an extent, and publish it. Returns the path of its object."""
        assert self.put(number, rows, range(-(-rows // 64))).ok
        self.shared.publish(Published(extent_name(number), 0, rows), f"{number:040x}")
        assert self.shared.rest(20)
        return self.shared.paths.extent(extent_name(number))

    def fetch(self, *numbers: int, rows: int = ROWS) -> list[int]:
        """Begin loads of other stores' extents, side by side. Returns the moves."""
        assert self.store.far is not None
        moves = []
        for index, number in enumerate(numbers):
            self.store.far.expect(record(number, rows))
            self.moves += 1
            slots = range(10 + index * 5, 10 + index * 5 + -(-rows // 64))
            moves.append(Load(self.moves, extent_name(number), rows, tuple(slots)))
        self.store.start(moves)
        return [move.move for move in moves]

    def leftovers(self) -> list[Path]:
        return list((self.path / "extents").glob("*/.tmp-*"))

    def ended(self) -> list[MoveDone]:
        return [done for done in self.settle() if isinstance(done, MoveDone)]


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "RANGE_BYTES", 1)


@pytest.mark.parametrize("layout", [ALIGNED, ODD, EIGHT_BITS], ids=["aligned", "odd", "eight bits"])
@pytest.mark.parametrize("rows", [1, 64, 300])
@pytest.mark.usefixtures("small_ranges")
def test_an_extent_comes_back_to_the_bit(tmp_path: Path, layout: KVLayout, rows: int) -> None:
    objects = Memory()
    with Sharing(tmp_path / "a", objects, layout) as a, Sharing(tmp_path / "b", objects, layout) as b:
        path = a.share(1, rows)
        wanted = contents(a.store.arena, range(-(-rows // 64)), rows)
        b.fetch(1, rows=rows)
        (done,) = b.ended()
        assert (done.ok, done.bytes) == (True, len(objects.objects[path]))
        assert np.array_equal(contents(b.store.arena, range(10, 10 + -(-rows // 64)), rows), wanted)
        assert b.file(1).read_bytes() == objects.objects[path]
        assert b.leftovers() == []
        objects.objects.clear()
        assert b.get(1, rows, range(20, 20 + -(-rows // 64))).ok, "it is on this disk now"


@pytest.mark.usefixtures("small_ranges")
def test_layers_are_read_while_later_ones_are_still_on_their_way(tmp_path: Path) -> None:
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a, Sharing(tmp_path / "b", objects) as b:
        a.share(1)
        wanted = contents(a.store.arena, SOURCE, ROWS)
        objects.gate.clear()
        objects.gated = LAYOUT.offset(ROWS, 2, 0)
        (move,) = b.fetch(1)
        assert b.store.wait_layer(move, 1, 20)
        assert np.array_equal(contents(b.store.arena, (10, 11), ROWS)[:2], wanted[:2])
        assert not b.store.wait_layer(move, 2, 0.01)
        assert not b.file(1).exists(), "the file is an extent's when all of it has been verified"
        objects.gate.set()
        assert b.store.wait_layer(move, 3, 20)
        (done,) = b.ended()
        assert done.ok
        assert b.file(1).exists()


@pytest.mark.usefixtures("small_ranges")
def test_first_layers_of_all_extents_come_before_the_last_of_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "FETCHERS", 1)
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a, Sharing(tmp_path / "b", objects) as b:
        paths = [a.share(number) for number in (1, 2, 3)]
        objects.gate.clear()
        b.fetch(1, 2, 3)
        objects.gate.set()
        assert all(done.ok for done in b.ended())
        order = [path for path, _ in objects.gets]
        assert sorted(order[:3]) == sorted(order[3:6]) == sorted(order[6:9]) == sorted(paths)


@pytest.mark.parametrize("late", [1, 2, 3])
@pytest.mark.usefixtures("small_ranges")
def test_a_fetch_that_fails_in_the_middle_leaves_nothing(tmp_path: Path, late: int) -> None:
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a, Sharing(tmp_path / "b", objects) as b:
        a.share(1)
        objects.broken = LAYOUT.offset(ROWS, late, 0)
        b.fetch(1)
        (done,) = b.ended()
        assert (done.ok, done.why) == (False, "io")
        wait_for(lambda: b.shared.stats().queue == 0)
        assert b.leftovers() == []
        assert not b.file(1).exists()
        assert b.shared.stats().failures == {"io": 1}
        assert b.store.stats().errors == {}, "the disk has done no wrong"
        objects.broken = None
        b.fetch(1)
        (done,) = b.ended()
        assert done.ok


@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize("layer", [0, 3])
def test_damage_in_any_layer_leaves_nothing_and_removes_the_object(tmp_path: Path, layer: int) -> None:
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a, Sharing(tmp_path / "b", objects) as b:
        path = a.share(1)
        data = bytearray(objects.objects[path])
        data[LAYOUT.offset(ROWS, layer, 1)] ^= 1
        objects.objects[path] = bytes(data)
        b.fetch(1)
        (done,) = b.ended()
        assert (done.ok, done.why) == (False, "damage")
        wait_for(lambda: b.shared.stats().queue == 0)
        assert path not in objects.objects
        assert b.leftovers() == []
        assert not b.file(1).exists()
        assert extent_name(1) not in b.store.on_disk
        assert b.shared.stats().failures["damage"] == 1


def flipped(data: bytes, at: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("rows", [1, 64, 100])
@pytest.mark.parametrize("large", [1, 10_000, 1 << 20])
def test_every_byte_of_every_range_is_verified_as_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int, rows: int
) -> None:
    """Ranges end at chunks, however large layers are."""
    monkeypatch.setattr(fetcher, "MAX_RANGE_BYTES", large)
    objects = Memory()
    with Sharing(tmp_path / "a", objects, ODD) as a, Sharing(tmp_path / "b", objects, ODD) as b:
        path = a.share(1, rows)
        whole = objects.objects[path]
        for at in (9, 5000, ODD.head_bytes(rows), ODD.offset(rows, 1, 0) - 1, ODD.offset(rows, 1, 1), len(whole) - 1):
            objects.objects[path] = flipped(whole, at)
            b.fetch(1, rows=rows)
            (done,) = b.ended()
            assert (done.ok, done.why) == (False, "damage"), at
            assert b.shared.rest(20)
            assert path not in objects.objects
        objects.objects[path] = whole
        b.fetch(1, rows=rows)
        (done,) = b.ended()
        assert done.ok
        assert b.file(1).read_bytes() == whole


@pytest.mark.usefixtures("small_ranges")
def test_a_range_that_is_damaged_on_its_way_is_read_again(tmp_path: Path) -> None:
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a, Sharing(tmp_path / "b", objects) as b:
        path = a.share(1)
        get, bad = objects.get, {0, LAYOUT.offset(ROWS, 2, 0)}

        def once(path: str, start: int, length: int) -> bytes:
            data = get(path, start, length)
            if start not in bad:
                return data
            bad.remove(start)
            return flipped(data, len(data) // 2)

        objects.get = once  # type: ignore[method-assign]
        b.fetch(1)
        (done,) = b.ended()
        assert done.ok
        assert not bad
        assert b.file(1).read_bytes() == objects.objects[path]
        assert b.shared.stats().failures == {}


def spoil(monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    """Let the disk store another byte than the one that is written at `start`."""
    pwrite = os.pwrite

    def wrong(fd: int, data: bytes, at: int) -> int:
        return pwrite(fd, flipped(data, start - at) if at <= start < at + len(data) else data, at)

    monkeypatch.setattr(os, "pwrite", wrong)


@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize("layer", [0, 3])
def test_a_bad_disk_removes_nothing_from_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int) -> None:
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a, Sharing(tmp_path / "b", objects) as b:
        path = a.share(1)
        with monkeypatch.context() as bad:
            spoil(bad, LAYOUT.offset(ROWS, layer, 1))
            b.fetch(1)
            (done,) = b.ended()
        assert (done.ok, done.why) == (False, "damage")
        assert b.shared.rest(20)
        assert path in objects.objects
        assert b.leftovers() == []
        assert not b.file(1).exists()
        assert b.shared.stats().failures == {}, "the store has done no wrong"
        b.fetch(1)
        (done,) = b.ended()
        assert done.ok


@pytest.mark.usefixtures("small_ranges")
def test_damage_is_named_although_the_fetch_ends_for_its_sake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a, Sharing(tmp_path / "b", objects) as b:
        path = a.share(1)
        spoil(monkeypatch, LAYOUT.offset(ROWS, 0, 1))
        objects.gated = LAYOUT.offset(ROWS, 2, 0)
        objects.gate.clear()
        unlink = os.unlink

        def until_the_fetch_has_ended(path: str) -> None:
            """The load removes its file when it has failed; before it goes on, the fetch hears of that, and ends too."""
            unlink(path)
            objects.gate.set()
            if threading.current_thread().name != "afterglow-fetcher":
                wait_for(lambda: b.shared.stats().queue == 0)

        monkeypatch.setattr(os, "unlink", until_the_fetch_has_ended)
        b.fetch(1)
        (done,) = b.ended()
        assert (done.ok, done.why) == (False, "damage")
        assert path in objects.objects


@pytest.mark.usefixtures("small_ranges")
def test_closing_does_not_wait_for_a_fetch(tmp_path: Path) -> None:
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a:
        a.share(1)
        b = Sharing(tmp_path / "b", objects)
        objects.gate.clear()
        objects.gated = LAYOUT.offset(ROWS, 1, 0)
        (move,) = b.fetch(1)
        assert b.store.wait_layer(move, 0, 20)
        b.store.close()
        assert [done.ok for done in b.store.finished() if isinstance(done, MoveDone)] == [False]
        objects.gate.set()


@pytest.mark.parametrize("lost", ["refused", "no room in the queue"])
def test_what_a_merged_extent_replaces_stays_until_that_is_published_or_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a:
        old, other = a.share(1), a.share(2)
        assert a.put(3, ROWS, SOURCE).ok
        assert a.put(4, ROWS, SOURCE).ok
        if lost == "refused":
            monkeypatch.setattr(remote, "REST_S", 0.1)
            objects.fail += [PermissionError(13, "no")] * extent_publisher.MAX_TRIES
        else:
            monkeypatch.setattr(extent_publisher, "MAX_QUEUE", 0)
        a.shared.replaced(extent_name(1), extent_name(3))
        a.shared.publish(Published(extent_name(3), 0, ROWS), f"{3:040x}")
        assert a.shared.rest(20)
        monkeypatch.undo()
        assert a.shared.stats().unpublished == 1
        assert {old, other} <= objects.objects.keys()
        # It is merged once more, and that one is published.
        a.shared.replaced(extent_name(3), extent_name(4))
        a.shared.replaced(extent_name(2), extent_name(4))
        a.shared.publish(Published(extent_name(4), 0, ROWS), f"{4:040x}")
        assert a.shared.rest(20)
        assert not {old, other} & objects.objects.keys()
        last = a.shared.paths.extent(extent_name(4))
        a.shared.replaced(extent_name(4), extent_name(5))
        assert a.shared.rest(20)
        assert last in objects.objects
        a.shared.delete(extent_name(5))  # by a client: no text is to stay
        assert a.shared.rest(20)
        assert last not in objects.objects


def test_what_is_published_comes_before_what_it_replaces_goes(tmp_path: Path) -> None:
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a:
        old = a.share(1)
        assert a.put(2, ROWS, SOURCE).ok
        there: list[bool] = []
        put = objects.put

        def watched(path: str, data: bytes, *, replace: bool = False) -> bool:
            there.append(old in objects.objects)
            return put(path, data, replace=replace)

        objects.put = watched  # type: ignore[method-assign]
        a.shared.replaced(extent_name(1), extent_name(2))
        a.shared.publish(Published(extent_name(2), 0, ROWS), "0" * 40)
        assert a.shared.rest(20)
        assert there == [True, True]
        assert old not in objects.objects


def test_what_an_outage_held_up_is_published_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "REST_S", 0.3)
    monkeypatch.setattr(extent_publisher, "RETRY_S", 0.1)
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a:
        gone = a.share(9)
        for number in (1, 2, 3):
            assert a.put(number, ROWS, SOURCE).ok
        assert objects.warmed.wait(20)  # a listing that comes late would take one of the failures
        objects.fail += [PermissionError(13, "no")] * 5
        a.shared.delete(extent_name(9))
        for number in (1, 2, 3):
            a.shared.publish(Published(extent_name(number), 0, ROWS), f"{number:040x}")
        wait_for(lambda: gone not in objects.objects and a.shared.stats().queue == 0)
        stats = a.shared.stats()
        assert stats.failures == {"denied": 5}
        assert stats.published + stats.unpublished == 1 + 3
        assert stats.published >= 1 + 2, "one has had its tries"


def test_an_extent_that_a_prompt_follows_in_part_is_believed_by_its_head_alone(tmp_path: Path) -> None:
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a:
        prompt, listed = np.arange(50, dtype=np.uint32).tobytes(), Published("ab" * 20, 0, ROWS)
        expired = listed._replace(expires=1)
        for each in (listed, expired, "of another program"):
            objects.objects[f"{a.shared.paths.under(listed_under('s', prompt[:4]))}/{each}"] = b""
        path = a.shared.paths.extent(listed.id)

        def found() -> list[SharedExtent]:
            answers: list[list[SharedExtent]] = []
            a.shared.look_up(Prompt("s", prompt), lambda path: answers.append(list(path)))
            wait_for(lambda: answers)
            return answers[0]

        assert found() == [], "nothing is there"
        assert [read for read, _ in objects.gets] == [path], "once, for the one that has not expired"
        objects.objects[path] = bytes(100_000)
        assert found() == [], "damaged"
        objects.objects[path] = objects.objects[a.share(1)]
        assert found() == [], "another extent's"
        assert a.shared.stats().failures == {}


def test_a_lookup_that_takes_too_long_ends_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Sharing(tmp_path / "a", Memory()) as a:
        monkeypatch.setattr("afterglow.store.shared.shared_store.LOOKUP_S", 0.0)
        answers: list[object] = []
        a.shared.look_up(Prompt("s", bytes(400)), answers.append)
        wait_for(lambda: answers)
        assert answers == [[]]
        assert a.shared.stats().failures == {"timeout": 1}


def test_the_store_is_opened_before_a_request_waits_for_it(tmp_path: Path) -> None:
    opened = threading.Event()

    class Slow(Memory):
        def list(self, prefix: str) -> Iterator[list[Listed]]:
            yield from super().list(prefix)
            opened.set()

    with Sharing(tmp_path / "a", Slow()):
        assert opened.wait(20)


def test_a_store_that_cannot_be_opened_at_the_start_is_no_failure_yet(tmp_path: Path) -> None:
    tried = threading.Event()

    class Broken(Memory):
        def list(self, prefix: str) -> Iterator[list[Listed]]:
            tried.set()
            raise ConnectionResetError("no")

    with Sharing(tmp_path / "a", Broken()) as a:
        assert tried.wait(20)
        assert a.shared.stats().failures == {}
        assert not a.shared.stats().rests


def failing_deletes(objects: Memory, times: int) -> None:
    """Let so many removals fail."""
    delete, left = objects.delete, [None] * times

    def failing(path: str) -> None:
        if left:
            left.pop()
            raise ConnectionResetError("no")
        delete(path)

    objects.delete = failing  # type: ignore[method-assign]


def test_a_removal_that_failed_removes_nothing_that_is_published_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_FAILURES", 1000)
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr(extent_publisher, "time", clock)  # which the test moves on
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a:
        path = a.share(1)
        kid = a.shared.paths.kid(f"{1:040x}", Published(extent_name(1), 0, ROWS))
        failing_deletes(objects, 2 * extent_publisher.MAX_TRIES)
        a.shared.delete(extent_name(1))
        assert a.shared.rest(20)
        assert {path, kid} <= set(objects.objects), "it cannot be removed"
        objects.written.clear()
        a.shared.publish(Published(extent_name(1), 0, ROWS), f"{1:040x}")
        assert a.shared.rest(20)
        assert objects.written == [path, kid], "the old ones went before"
        now += 2 * extent_publisher.RETRY_S
        a.share(2)  # what is to be tried again goes before
        assert {path, kid} <= set(objects.objects)


def test_removals_that_failed_go_before_what_waits_to_be_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both are due when the store answers again."""
    monkeypatch.setattr(remote, "MAX_FAILURES", 2 * extent_publisher.MAX_TRIES)
    monkeypatch.setattr(extent_publisher, "RETRY_S", 0.1)
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a:
        path = a.share(1)
        failing_deletes(objects, 2 * extent_publisher.MAX_TRIES)
        a.shared.delete(extent_name(1))
        wait_for(lambda: a.shared.stats().rests)
        a.shared.publish(Published(extent_name(1), 0, ROWS), f"{1:040x}")
        time.sleep(0.15)  # at least, after which removals are due
        doors.end_rest(a.shared)
        assert a.shared.rest(20)
        assert path in objects.objects


def test_a_damaged_object_that_cannot_be_removed_is_left_to_the_next_that_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_FAILURES", 1000)
    monkeypatch.setattr(extent_publisher, "RETRY_S", 0.1)
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a, Sharing(tmp_path / "b", objects) as b:
        path = a.share(1)
        good = objects.objects[path]
        objects.objects[path] = flipped(good, 5000)
        failing_deletes(objects, extent_publisher.MAX_TRIES)
        b.fetch(1)
        assert [done.why for done in b.ended()] == ["damage"]
        assert b.shared.rest(20)
        objects.objects[path] = good  # by another engine
        time.sleep(0.3)
        assert b.shared.rest(20)
        assert objects.objects[path] == good


def test_however_long_a_count_of_all_objects_takes_extents_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "LIST_S", 2.0)

    class Many(Memory):
        """Lists some objects at a time, and takes longer for all of them than a step may; each is much sooner there."""

        def list(self, prefix: str) -> Iterator[list[Listed]]:
            for _ in range(11 if prefix.endswith("extents") else 0):
                time.sleep(0.2)
                yield []
            yield from super().list(prefix)

    objects = Many()
    with Sharing(tmp_path / "a", objects) as a:
        path = a.share(1)
        assert path in objects.objects
        assert a.shared.stats().failures == {}


def resting_publisher() -> tuple[extent_publisher.ExtentPublisher, SharedCounters]:
    """Make one whose store is left alone, and its counters."""
    resting = Remote(Memory)
    resting.close()
    counters, paths = SharedCounters(), Paths("digest")
    room = budget.Budget(resting, paths, 1, counters)
    return extent_publisher.ExtentPublisher(resting, paths, room, counters), counters


def test_a_deletion_does_not_look_at_all_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset deletes thousands of extents at once, on the engine's thread."""
    looks = 0

    class Watched(deque):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[object]:
            nonlocal looks
            looks += 1
            return super().__iter__()

    monkeypatch.setattr(extent_publisher, "deque", Watched)
    publisher, _ = resting_publisher()
    for number in range(10):
        publisher.delete(extent_name(number))
    assert (publisher.pending, looks) == (10, 0)
    publisher.close(0)


def test_what_is_too_much_to_be_removed_is_told_once_and_not_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(extent_publisher, "MAX_REMOVALS", 4)
    publisher, counters = resting_publisher()
    for number in range(9):
        publisher.delete(extent_name(number))
    assert (publisher.pending, counters.snapshot().deleted) == (4, 4)
    assert caplog.messages == ["4 removals wait for the shared store: further objects that were deleted stay in it"]
    publisher.close(0)


def test_threads_are_kept_for_what_comes_next() -> None:
    kept = KeptThreads("kept")
    names: list[int] = []
    gate = threading.Event()

    def work() -> None:
        names.append(threading.get_ident())
        gate.wait(20)

    gate.set()
    for number in range(5):
        kept.run(work)
        wait_for(lambda: len(names) > number)  # noqa: B023
        wait_for(lambda: kept.idle)
    assert len(set(names)) == 1
    gate.clear()
    for _ in range(KEPT_THREADS + 2):
        kept.run(work)
    wait_for(lambda: len(names) == 5 + KEPT_THREADS + 2)
    gate.set()
    wait_for(lambda: kept.idle == KEPT_THREADS)
    kept.close()
    wait_for(lambda: not any(thread.name == "kept" for thread in threading.enumerate()))
    kept.run(work)
    wait_for(lambda: not any(thread.name == "kept" for thread in threading.enumerate()))
    assert len(names) == 5 + KEPT_THREADS + 3


def test_of_a_path_that_is_taken_over_the_beginning_is_used_last(tmp_path: Path) -> None:
    """Without its beginning nothing leads to an extent: it must not be the first to go when there is no room."""
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a:
        paths = []
        for number in (1, 2, 3):
            a.share(number)
            paths.append(a.shared.paths.kid(f"{number:040x}", Published(extent_name(number), 0, ROWS)))
        taken = [
            SharedExtent(Published(extent_name(number), 0, ROWS), b"", Listed(path, 0, 0.0))
            for number, path in enumerate(paths, 1)
        ]
        objects.written.clear()
        a.shared.expect(taken)
        assert a.shared.rest(20)
        assert objects.written == paths[::-1]


def test_extents_that_lead_to_one_that_is_published_are_used_the_nearest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation that stays where it is does not look for its own rows: its beginning must not be the first to go."""
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a:
        kids = []
        for number in (1, 2):
            a.share(number)
            kids.append(a.shared.paths.kid(f"{number:040x}", Published(extent_name(number), 0, ROWS)))
        for number, wanted in ((3, []), (4, kids[::-1])):
            objects.written.clear()
            assert a.put(number, ROWS, SOURCE).ok
            published = Published(extent_name(number), 0, ROWS)
            above = (extent_name(2), extent_name(9), extent_name(1))
            a.shared.publish(published, f"{number:040x}", above=above)
            assert a.shared.rest(20)
            own = [a.shared.paths.extent(extent_name(number)), a.shared.paths.kid(f"{number:040x}", published)]
            assert objects.written == [*own, *wanted], "a use counts after ten minutes"
            monkeypatch.setattr(shared_room, "REFRESH_S", -1.0)


def test_an_extent_that_is_published_again_is_used(tmp_path: Path) -> None:
    objects = Memory()
    with Sharing(tmp_path / "a", objects) as a, Sharing(tmp_path / "b", objects) as b:
        path = a.share(1)
        kid = a.shared.paths.kid(f"{1:040x}", Published(extent_name(1), 0, ROWS))
        assert objects.written == [path, kid]
        b.share(1)
        assert objects.written == [path, kid, kid]
        assert (b.shared.stats().published, b.shared.stats().published_before) == (0, 1)
