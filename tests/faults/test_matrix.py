"""The fault matrix: the injected fault x the phase where it is met. Each cell is played on the real scheduler
and the real store.

What happened is compared with `docs/faults.md`, word for word; `AFTERGLOW_WRITE_DOCS=1` writes that file anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afterglow.errors import StoreError
from afterglow.plan.step import Drop, ExtentRecord, Store
from afterglow.store import admin
from afterglow.store.database.recovery import open_catalog
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.extents.tier import arena_bytes
from afterglow.store.kvstore import KVStore
from afterglow.store.namespace.namespace import Namespace
from tests.faults import report
from tests.faults.harness import (
    DIGEST,
    LAYOUT,
    OTHER_DIGEST,
    SHORT,
    TIMEOUT,
    Talk,
    Text,
    World,
    WrongRow,
    encode,
    facts_of,
    file_of,
    flip,
    path_of,
    place,
)
from tests.faults.scenes import (
    TENANT_VICTIM,
    VICTIM,
    Scene,
    extents,
    first_pieces,
    of,
    statement,
    whole_extents,
)
from tests.faults.syscalls import Act, Rule, cut_before, error, flip_on_the_way, hang, late

pytestmark = pytest.mark.timeout(120)

PATIENT = 1.1  # the time-out where two slow calls in a row are progress, and three are longer
FULL, BROKEN = error(errno.ENOSPC), error(errno.EIO)


@dataclass(frozen=True)
class Cell:
    """Describes a cell. `how`: the fault in words; `play` injects it."""

    fault: str
    phase: str
    how: str
    play: Callable[[Scene], None]
    timeout: float = TIMEOUT
    bug: str = ""  # why it fails today, or (not `always`) may fail
    always: bool = True

    @property
    def key(self) -> report.Key:
        return self.fault, self.phase, self.how


# ----------------------------------------------------------------------------------------- harm to an extent's file

Harm = Callable[[Scene, ExtentRecord], Rule | None]
InWrites = Callable[[Scene, World], Rule | None]
AtStart = Callable[[Scene], Rule | None]


def flipped(part: str) -> Harm:
    return lambda scene, victim: flip(scene.file(victim), place(part, victim.rows))


def cut(scene: Scene, victim: ExtentRecord) -> None:
    os.truncate(scene.file(victim), victim.file_bytes // 2)


def foreign(scene: Scene, victim: ExtentRecord) -> None:
    """Another model's extent, whole and with right checksums, under this one's name."""
    scene.file(victim).write_bytes(foreign_file(victim))


def foreign_file(record: ExtentRecord) -> bytes:
    contents = np.frombuffer(os.urandom(LAYOUT.layers * 2 * record.rows * LAYOUT.row_bytes), np.uint8)
    return encode(record, contents.reshape(LAYOUT.layers, 2, record.rows, -1), OTHER_DIGEST)


def neighbour(scene: Scene, victim: ExtentRecord) -> None:
    """The other tenant's extent of the very same tokens under this one's name."""
    theirs = scene.victim(scene.second, TENANT_VICTIM)
    assert theirs.tokens == victim.tokens
    shutil.copy(scene.file(theirs), scene.file(victim))


def on_reads(names: str, act: Act, **more: Any) -> Harm:
    return lambda scene, victim: scene.calls.add(Rule([names], act, of(scene.file(victim)), **more))


def hanging_read(scene: Scene, victim: ExtentRecord) -> Rule:
    return scene.calls.add(Rule(["preadv"], hang(scene.gate), of(scene.file(victim)), skip=1, limit=1))


def damaged_and_full(scene: Scene, victim: ExtentRecord) -> Rule:
    flip(scene.file(victim), place("values", victim.rows))
    return scene.calls.add(Rule(["sql"], FULL, statement("DELETE"), limit=1))


# --------------------------------------------------------------------------------------------------- harm to writes


def flip_in_writes(part: str) -> InWrites:
    """Of the first extent that is written, a bit changes on its way to the disk."""

    def where(head: bytes) -> int:
        rows = int(head[head.index(b'"rows":"') + 8 :][:8])
        return 8 + 150 if part == "header" else LAYOUT.offset(rows, 0, ("keys", "values").index(part)) + 77

    return in_writes("pwritev", flip_on_the_way(where), first_pieces, limit=1)


def in_writes(name: str, act: Act, match: Callable[..., bool] = extents, **more: Any) -> InWrites:
    return lambda scene, world: scene.calls.add(Rule([name], act, match, **more))


def hanging(name: str, match: Callable[..., bool] = extents) -> InWrites:
    return lambda scene, world: scene.calls.add(Rule([name], hang(scene.gate), match, limit=1))


def something_there(what: Callable[[Scene, ExtentRecord], bytes]) -> InWrites:
    """Something else lies already under the name of an extent that is going to be written."""

    def harm(scene: Scene, world: World) -> Rule:
        (prepared,) = [path for path in scene.prepared.iterdir() if path.is_dir()]
        victim = path_of(prepared, Talk("Ada", "a").imagine(3))[VICTIM]
        file = scene.file(victim)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(what(scene, victim))
        return scene.calls.add(Rule(["rename"], lambda call: call(), lambda call: os.fspath(call.args[1]) == str(file)))

    return harm


def strange_file(record: ExtentRecord) -> bytes:
    """Some third tenant's extent."""
    rows = Text("z", [1] * record.rows).rows(0, record.rows)
    return encode(replace(record, id="ab" * 20, salt="z"), rows)


def neighbours_file(scene: Scene, victim: ExtentRecord) -> bytes:
    (prepared,) = [path for path in scene.prepared.iterdir() if path.is_dir()]
    theirs = path_of(prepared, Talk("Ada", "b").imagine(3))[VICTIM]
    return file_of(prepared, theirs.id).read_bytes()


def dropped(what: Callable[[ExtentRecord], bytes]) -> Callable[[Scene], None]:
    """All files of a conversation that is not asked any more are something else, when the disk needs their room."""

    def play(scene: Scene) -> None:
        harmed: set[str] = set()

        def harm(scene: Scene, world: World) -> None:
            for record in admin.list_extents(scene.namespace):
                if record.salt == scene.first.salt:
                    scene.file(record).write_bytes(what(record))
                    harmed.add(record.id)
            assert harmed

        def done(world: World) -> bool:
            return any(isinstance(move, Drop) and move.extent in harmed for _, move in world.started)

        scene.brief = True  # how many go is chance
        scene.tell("removed without being read")
        scene.evict(harm, done, quiet=1)

    return play


# --------------------------------------------------------------------------------------------- harm to the catalog


def flip_row(scene: Scene, victim: ExtentRecord) -> None:
    """A bit of a token, wherever the row lies in the catalog's files."""
    met = 0
    for file in scene.namespace.glob("catalog.sqlite*"):
        data, at = file.read_bytes(), -1
        while not file.name.endswith("-shm") and (at := data.find(victim.tokens, at + 1)) >= 0:
            flip(file, at + 101)
            met += 1
    assert met, "the row is nowhere"


def flip_row_meanwhile(scene: Scene, world: World) -> None:
    flip_row(scene, path_of(scene.namespace, scene.first)[0])


def flip_anybodys_row(scene: Scene, world: World) -> None:
    scene.brief = True  # who is on disk by now, and who reads it or removes it next, is chance
    scene.tell("evictions went on")
    paths = (path_of(scene.namespace, talk) for talk in scene.talks)
    flip_row(scene, next(path[0] for path in paths if path))


def lose_catalog(scene: Scene) -> None:
    for file in scene.namespace.glob("catalog*"):
        file.unlink()


def flip_magic(scene: Scene) -> None:
    flip(scene.namespace / "catalog.sqlite", 3)


def change_salt(scene: Scene) -> None:
    victim = scene.victim(scene.second)
    with contextlib.closing(sqlite3.connect(scene.namespace / "catalog.sqlite")) as db:
        db.execute("UPDATE extents SET salt = 'a' WHERE id = ?", [victim.id])
        db.commit()


def foreign_namespace(scene: Scene) -> None:
    """Catalog and extents of another model, who has heard the same words, in place of ours."""
    world = World(scene.folder.with_name("foreign"), digest=OTHER_DIGEST)
    for talk in (Talk("Ada", "a"), Talk("Ada", "b")):
        world.say(talk)
    world.close()
    for name in ("extents", "catalog.sqlite"):
        target = scene.namespace / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        source = world.path / name
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


def orphans(scene: Scene) -> None:
    with contextlib.closing(sqlite3.connect(scene.namespace / "catalog.sqlite")) as db:
        for record in path_of(scene.namespace, scene.second)[4:]:
            db.execute("DELETE FROM extents WHERE id = ?", [record.id])
        db.commit()


def hanging_sweep(scene: Scene) -> Rule:
    return scene.calls.add(Rule(["unlink"], hang(scene.gate), whole_extents, limit=1))


def at_start(*names: str, act: Act, match: Callable[..., bool] = lambda call: True, **more: Any) -> AtStart:
    return lambda scene: scene.calls.add(Rule(names, act, match, **more))


def both(first: Callable[[Scene], object], then: Callable[[Scene], Rule | None]) -> Callable[[Scene], Rule | None]:
    def harm(scene: Scene) -> Rule | None:
        first(scene)
        return then(scene)

    return harm


# ------------------------------------------------------------------------------------------ a file system that is full

_libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
MS_REMOUNT, MNT_DETACH = 32, 2


def _mount(folder: Path, size: str, flags: int = 0) -> bool:
    return int(_libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, f"size={size}".encode())) == 0


@contextlib.contextmanager
def small_disk(scene: Scene, size: str) -> Iterator[None]:
    """The cache directory is a file system of its own; skips where mounting is not allowed."""
    scene.folder.mkdir()
    if not _mount(scene.folder, size):
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        for world in scene.worlds:
            world.abandon()
        _libc.umount2(os.fsencode(scene.folder), MNT_DETACH)


def not_stored(world: World) -> bool:
    return world.scheduler.stats().counters.store_failures > 0


def really_full(play: Callable[[Scene, InWrites], None]) -> Callable[[Scene], None]:
    def played(scene: Scene) -> None:
        with small_disk(scene, "16m"):

            def fill(scene: Scene, world: World) -> None:
                free = os.statvfs(scene.folder)
                (scene.namespace / "ballast").write_bytes(bytes((free.f_bavail - 20) * free.f_frsize))

            def empty(scene: Scene) -> None:
                assert not_stored(scene.worlds[0]), "the fault was never met"
                (scene.namespace / "ballast").unlink()

            scene.before_recovery = empty
            scene.brief = True  # which write is the first to fail is chance
            play(scene, fill)
            scene.end()

    return played


def start_on_a_full_disk(scene: Scene) -> None:
    with small_disk(scene, "16m"):

        def fill(scene: Scene) -> None:
            free = os.statvfs(scene.folder)
            with open(scene.folder / "ballast", "wb", buffering=0) as file:
                file.write(bytes(free.f_bavail * free.f_frsize))

        scene.before_recovery = lambda scene: (scene.folder / "ballast").unlink()
        scene.start(fill)
        scene.end()


# ------------------------------------------------------------------------------------------------------- the matrix


def matrix() -> Iterator[Cell]:
    yield from flips()
    yield from cuts_and_strangers()
    yield from errors()
    yield from slowness()


def reading(fault: str, how: str, harm: Harm, **more: Any) -> Iterator[Cell]:
    """A cell for a read that a step waits for, and one for a read ahead."""
    index = more.pop("index", VICTIM)
    for phase in ("load", "prefetch"):
        yield Cell(fault, phase, how, partial(Scene.read, phase=phase, harm=harm, index=index), **more)


def writing(fault: str, how: str, harm: InWrites, **more: Any) -> Iterator[Cell]:
    """Yield a cell for writing new rows, and one for writing evicted rows."""
    yield Cell(fault, "save", how, partial(Scene.save, harm=harm), **more)
    yield Cell(fault, "evict", how, partial(Scene.evict, harm=harm), **more)


def either_commit(scene: Scene, harm: InWrites) -> None:
    """Play evictions: chance decides which transaction of the catalog is met, and so the outcome."""
    scene.brief = True
    scene.evict(harm)
    failed = {done.why for _, move, done in scene.worlds[0].failed_moves if isinstance(move, Store | Drop)}
    assert failed
    scene.story = ["a write or a removal failed", f"counted as {' and '.join(sorted(map(str, failed - {'refused'})))}"]


def evicting(fault: str, how: str, harm: InWrites, **more: Any) -> Cell:
    done = more.pop("done", None)
    return Cell(fault, "evict", how, partial(Scene.evict, harm=harm, done=done), **more)


def starting(fault: str, how: str, harm: AtStart, **more: Any) -> Cell:
    whose = more.pop("whose", 0)
    return Cell(fault, "start", how, partial(Scene.start, harm=harm, whose=whose), **more)


def before_start(harm: Harm) -> AtStart:
    return lambda scene: harm(scene, scene.victim())


def flips() -> Iterator[Cell]:
    for part in ("keys", "values", "header"):
        fault = f"bit flip in {'the ' if part == 'header' else ''}{part}"
        yield from reading(fault, "a bit of the file", flipped(part))
        yield from writing(fault, "a bit on its way to disk", flip_in_writes(part))
        yield starting(fault, "a bit of a file", before_start(flipped(part)))
    lost = both(before_start(flipped("header")), lose_catalog)
    yield starting(fault, "a bit of a file, and the catalog is lost", lost)

    fault = "bit flip in the catalog"
    yield from reading(fault, "a bit of the extent's row, meanwhile", flip_row)
    yield Cell(fault, "save", "a bit of a row, meanwhile", partial(Scene.save, harm=flip_row_meanwhile))
    yield evicting(fault, "a bit of a row, meanwhile", flip_anybodys_row, done=evicted)
    yield starting(fault, "a bit of a row", before_start(flip_row))
    yield starting(fault, "a bit of the first page", flip_magic)


def cuts_and_strangers() -> Iterator[Cell]:
    fault = "truncated file"
    yield from reading(fault, "half of the file is gone", cut)
    yield from writing(fault, "half is gone before it has its name", in_writes("rename", cut_before, limit=1))
    yield starting(fault, "half of a file is gone", before_start(cut))

    fault = "extent of another model"
    yield from reading(fault, "whole, under this one's name", foreign)
    there = something_there(lambda scene, victim: foreign_file(victim))
    yield Cell(fault, "save", "lies under the name to be written", partial(Scene.save, harm=there))
    yield Cell(fault, "evict", "lies under the name to be removed", dropped(foreign_file))
    yield starting(fault, "one, under the name of ours", before_start(foreign))
    yield starting(fault, "all extents and the catalog", foreign_namespace)

    fault = "extent of another tenant"
    yield from reading(fault, "of the same tokens, under this one's name", neighbour, index=TENANT_VICTIM)
    there = something_there(neighbours_file)
    yield Cell(fault, "save", "lies under the name to be written", partial(Scene.save, harm=there))
    yield Cell(fault, "evict", "lies under the name to be removed", dropped(strange_file))
    yield starting(fault, "a row of the catalog names another tenant", change_salt, whose=1)


def errors() -> Iterator[Cell]:
    fault = "no space (ENOSPC)"
    yield from reading(fault, "while a damaged extent is removed", damaged_and_full)
    yield from writing(fault, "at a write", in_writes("pwritev", FULL))
    yield from writing(fault, "at the catalog's row", in_writes("sql", FULL, statement("INSERT")))
    yield Cell(fault, "save", "a file system that is really full", really_full(Scene.save))
    full = really_full(lambda scene, fill: scene.evict(fill, not_stored))
    yield Cell(fault, "evict", "a file system that is really full", full)
    yield starting(fault, "at the lock", at_start("pwrite", act=FULL))
    yield starting(fault, "at the catalog", at_start("sql", act=FULL))
    yield Cell(fault, "start", "a file system that is really full", start_on_a_full_disk)

    fault = "I/O error (EIO)"
    yield from reading(fault, "at the second read", on_reads("preadv", BROKEN, skip=1))
    yield from reading(fault, "at opening the file", on_reads("open", BROKEN))
    yield from writing(fault, "at a write", in_writes("pwritev", BROKEN))
    yield from writing(fault, "at the rename", in_writes("rename", BROKEN))
    commit = in_writes("sql", BROKEN, statement("COMMIT"))
    yield Cell(fault, "save", "at the catalog's commit", partial(Scene.save, harm=commit))
    yield Cell(fault, "evict", "at the catalog's commit", partial(either_commit, harm=commit))
    yield evicting(fault, "at the removal", in_writes("unlink", BROKEN, whole_extents))
    yield starting(fault, "at listing the folder", at_start("scandir", act=BROKEN))
    yield starting(fault, "at the catalog, once", at_start("sql", act=BROKEN, limit=1))


def slowness() -> Iterator[Cell]:
    fault, slow = "slow disk", late(0.4 * PATIENT)
    how = "every read, longer than the time-out in all"
    yield from reading(fault, how, on_reads("preadv", slow), timeout=PATIENT)
    yield from writing(fault, "three writes", in_writes("pwritev", slow, limit=3), timeout=PATIENT)
    removals = in_writes("unlink", slow, whole_extents, limit=3)
    yield evicting(fault, "three removals", removals, timeout=PATIENT)
    sweep = both(orphans, at_start("unlink", act=slow, match=whole_extents))
    yield starting(fault, "the sweep of orphans", sweep, timeout=PATIENT)

    fault = "hanging disk"
    yield from reading(fault, "the second read", hanging_read, timeout=SHORT)
    yield from writing(fault, "a write", hanging("pwritev"), timeout=SHORT)
    commit = hanging("sql", statement("COMMIT"))
    yield Cell(fault, "save", "the catalog's commit", partial(Scene.save, harm=commit), SHORT)
    # Soon all threads hang; from then on Drops are refused, and never done.
    yield Cell(fault, "evict", "the catalog's commit", partial(either_commit, harm=commit), SHORT)
    yield evicting(fault, "a removal", hanging("unlink", whole_extents), timeout=SHORT)
    yield starting(fault, "the sweep of orphans", both(orphans, hanging_sweep), timeout=SHORT)


def evicted(world: World) -> bool:
    return world.scheduler.stats().counters.evicted_disk > 2


CELLS = list(matrix())
report.expect((cell.key, cell.bug) for cell in CELLS)


def parameter(cell: Cell) -> object:
    marks = [pytest.mark.xfail(strict=cell.always, reason=cell.bug)] if cell.bug else []
    return pytest.param(cell, marks=marks, id=f"{cell.fault}, {cell.phase}: {cell.how}")


@pytest.mark.parametrize("cell", map(parameter, CELLS))
def test_cell(scene: Scene, cell: Cell) -> None:
    scene.timeout = cell.timeout
    cell.play(scene)
    scene.end()
    report.happened(cell.key, scene.story)


# ---------------------------------------------------------------------------------------- would it notice anything?


def test_the_harness_sees_a_wrong_byte(scene: Scene) -> None:
    world = scene.open()
    world.say(scene.first)
    world.settle()
    world.scheduler.drop_contexts()
    used = np.flatnonzero((world.store.arena.view[1, 1] != 0xCC).any(axis=1))
    world.store.arena.view[1, 1, used[1], 70] ^= 1
    with pytest.raises(WrongRow, match="layer 1"):
        world.say(scene.first)


def test_the_harness_sees_a_flip_that_the_store_lets_pass(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.take_prepared()
    world = scene.open()
    victim = scene.victim()
    flip(scene.file(victim), place("keys", victim.rows))
    for name in ("_compare", "_compare_sums"):
        monkeypatch.setattr(f"afterglow.store.extents.extent_reader.{name}", lambda *_: None)
    with pytest.raises(WrongRow, match=victim.id[:16]):
        world.say(scene.first)


# ---------------------------------------------------------------------------------------- what else is to be known


def test_a_forged_extent_is_seen_by_check(scene: Scene) -> None:
    """Right id, right checksums, another tenant's rows: nothing that happens by itself. A load does not look for it."""
    scene.take_prepared()
    ours, theirs = scene.victim(index=TENANT_VICTIM), scene.victim(scene.second, TENANT_VICTIM)
    rows = Text("b", scene.second.tokens).rows(128, 128 + theirs.rows)
    scene.file(ours).write_bytes(encode(replace(theirs, id=ours.id), rows))
    assert {problem.kind for problem in admin.check(scene.namespace).problems} == {"id", "differs"}


def test_no_flip_in_the_catalog_makes_a_wrong_record(scene: Scene) -> None:
    """A bit anywhere in it: each record that comes out is what the extent's file says, or does not come out."""
    scene.take_prepared()
    catalog = scene.namespace / "catalog.sqlite"
    right = {record.id: record for record in admin.list_extents(scene.namespace)}
    sound = catalog.read_bytes()
    rng = random.Random(5)
    for _ in range(60):
        for file in scene.namespace.glob("catalog.sqlite*"):
            file.unlink()
        catalog.write_bytes(sound)
        flip(catalog, rng.randrange(len(sound)), 1 << rng.randrange(8))
        disk = DiskTier(scene.namespace / "extents", LAYOUT, DIGEST)
        opened = open_catalog(catalog, disk)
        opened.catalog.close()
        for record in opened.records:
            assert facts_of(record) == facts_of(right[record.id])
        assert len(opened.records) + len(opened.orphans) == len(right)


def test_an_io_error_is_no_damage(scene: Scene) -> None:
    """A catalog that could not be read once is not thrown away: only it knows names of conversations, pins, uses."""
    scene.take_prepared()
    namespace = Namespace.open(scene.folder, "m", DIGEST, LAYOUT)
    with contextlib.closing(store_of(namespace)) as store:
        store.note("session", [("a", "b")])
    scene.calls.add(Rule(["sql"], BROKEN, statement("SELECT"), limit=1))
    with (
        contextlib.suppress(StoreError),
        contextlib.closing(Namespace.open(scene.folder, "m", DIGEST, LAYOUT)) as opened,
    ):
        store_of(opened).close()
    with contextlib.closing(store_of(Namespace.open(scene.folder, "m", DIGEST, LAYOUT))) as store:
        assert store.notes("session") == {"a": "b"}


def store_of(namespace: Namespace) -> KVStore:
    return KVStore(LAYOUT, 4, bytearray(arena_bytes(LAYOUT, 4)), namespace=namespace, notify=lambda: None)
