"""The scene of a cell of the fault matrix: a cache directory, conversations, an engine of `harness`, a story.

A scene drives conversations so that one phase really happens, with a fault in it, and writes down the observations. Hard
promises are asserted here, in every cell: no wrong row, no failed request, no hang, budgets, and a `cache check` that
says what a reader of its own (`harness.Library`) finds.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from afterglow.errors import ConfigError, StoreError
from afterglow.plan.step import ExtentRecord, Load
from afterglow.plan.tiers.loading import LOAD_RETRY_LATE_S
from afterglow.store import admin
from afterglow.store.namespace.namespace import holder
from tests.faults.harness import (
    FILE_BYTES,
    TIMEOUT,
    Asked,
    Library,
    Talk,
    Truth,
    World,
    file_of,
    pack,
    path_of,
)
from tests.faults.syscalls import Call, Rule, Syscalls

VICTIM = 3  # which extent on the path of the first conversation is harmed: rows before it, and rows after it
TENANT_VICTIM = 1  # of the same tokens as the other tenant's, who begins with the same words

EVICT: dict[str, Any] = {
    "host_slots": 22,
    "device_rows": 960,
    "disk_bytes": 8 * FILE_BYTES[1],
}  # less than four conversations


def prepare(folder: Path) -> None:
    """Store two tenants' conversations that begin alike, three turns each, all on disk."""
    world = World(folder)
    first, second = Talk("Ada", "a"), Talk("Ada", "b")
    for _ in range(3):
        for talk in (first, second):
            world.say(talk)
            world.settle()  # or the next turn may not find all its rows, and be cut elsewhere
    world.close()


class Scene:
    """One cell being played."""

    def __init__(self, folder: Path, prepared: Path, calls: Syscalls) -> None:
        self.folder = folder
        self.calls = calls
        self.story: list[str] = []
        self.timeout = TIMEOUT
        self.brief = False  # tell nothing of counters and checks
        self.gate = threading.Event()
        self.talks: list[Talk] = []
        self.ahead: list[Talk] = []  # what others may have said that is not said yet
        self.worlds: list[World] = []
        self.before_recovery: Callable[[Scene], None] = lambda scene: None  # what else ends the fault
        self._over = self._ended = False
        self.prepared = prepared  # the folder that `take_prepared` copies
        self.first, self.second = Talk("Ada", "a"), Talk("Ada", "b")
        self.talks += [self.first, self.second]

    # ------------------------------------------------------------------------------------------- beginnings

    def take_prepared(self) -> None:
        """The cache directory of `prepare`, and both conversations where it left them."""
        shutil.copytree(self.prepared, self.folder, dirs_exist_ok=True)
        for talk in (self.first, self.second):
            talk.imagine(3)

    def open(self, **options: Any) -> World:
        world = World(self.folder, **{"timeout": self.timeout, **options})
        self.worlds.append(world)
        self.calls.under_way = lambda: [phase for phase, _ in world.phases()]
        return world

    @property
    def namespace(self) -> Path:
        (found,) = [path for path in self.folder.iterdir() if path.is_dir()]
        return found

    def talk(self, name: str) -> Talk:
        self.talks.append(Talk(name, name))
        return self.talks[-1]

    def victim(self, talk: Talk | None = None, index: int = VICTIM) -> ExtentRecord:
        return path_of(self.namespace, talk or self.first)[index]

    def file(self, record: ExtentRecord) -> Path:
        return file_of(self.namespace, record.id)

    # ----------------------------------------------------------------------------------------------- telling

    def tell(self, *words: str) -> None:
        """Add words to the story that are not there yet."""
        self.story += [word for word in words if word and word not in self.story]

    def hit(self, rule: Rule, phase: str) -> None:
        """The fault was met, and in its phase."""
        assert rule.hits, "the fault was never met"
        assert phase in rule.phases[0], f"first met outside of {phase}: {rule.phases}"  # later hits: retries

    def served(self, job: Asked, known: int, victim: ExtentRecord | None = None) -> None:
        """How many of the `known` rows that were cached before came from the cache."""
        if job.hits == known:
            self.tell("all rows were hits")
        elif victim is not None and job.hits == known - victim.rows:
            self.tell("its rows were computed, all others were hits")
        elif job.hits:
            self.tell("rows before it were hits, the rest was computed")
        else:
            self.tell("all rows were computed")

    def counted(self, world: World) -> None:
        kinds = sorted(world.store.stats().errors)
        if "timeout" in kinds:  # which moves are refused while a call hangs is chance
            kinds = [kind for kind in kinds if kind != "refused"]
        if not self.brief:
            self.tell(f"counted as {' and '.join(kinds)}" if kinds else "nothing was counted")

    def recover(self, world: World | None = None) -> None:
        """From now on nothing goes wrong; what hung returns."""
        self.calls.clear()
        self.gate.set()
        if not self._over:
            self._over = True
            self.before_recovery(self)
        if world is not None:
            world.until(lambda: not world.store.stats().hung, idle=True)
            world.settle()

    def tell_check(self, kinds: set[str]) -> None:
        if not self.brief:
            self.tell(f"`cache check` says {' and '.join(sorted(kinds))}" if kinds else "`cache check` finds it sound")

    # ------------------------------------------------------------------------------------------------ phases

    def read(self, phase: str, harm: Callable[[Scene, ExtentRecord], Rule | None], index: int = VICTIM) -> None:
        """An extent in the middle of a conversation is read: because a step needs it, or ahead of its job."""
        self.take_prepared()
        victim = self.victim(index=index)
        behind = phase == "prefetch"
        world = self.open(**({"policy": "lookahead", "max_batch": 1} if behind else {}))  # the only seat is taken
        rule = harm(self, victim)
        known = len(self.first.tokens) - 1
        if behind:
            other = world.submit(self.talk("Eve"), reply=60)
            world.until(lambda: bool(other.tokens))
        job = world.submit(self.first)
        world.until(lambda: job.finish is not None)
        phases = {started for started, move in world.started if isinstance(move, Load) and move.extent == victim.id}
        assert phases == {phase}, phases
        if rule is not None:
            self.hit(rule, phase)
        self.served(job, known, victim)
        self.counted(world)
        if world.store.stats().hung:
            self.tell("its slots were kept aside until the call returned")
        world.settle()
        self.recover(world)
        stayed = self.file(victim).exists()
        self.tell("the file stayed" if stayed else "the file was removed")
        again = world.say(self.first)
        assert again.hits == known + 110, "what was lost has been computed, and kept again"
        if stayed and job.hits < known:
            self.reread(world, victim)
        self.rest(world, flush=True)
        self.tell("later turns: all hits")

    def reread(self, world: World, victim: ExtentRecord) -> None:
        """The error has passed: after a while its extent is tried again."""
        world.later(LOAD_RETRY_LATE_S)
        world.to_disk()
        tried = len(world.started)
        known = len(self.first.tokens) - 1
        assert world.say(self.first).hits == known
        assert victim.id in {move.extent for _, move in world.started[tried:] if isinstance(move, Load)}
        self.tell("a minute later its rows are hits")

    def save(self, harm: Callable[[Scene, World], Rule | None]) -> None:
        """New rows are written through to disk as soon as they are computed."""
        world = self.open(write_policy="write_through")
        world.say(self.first)
        world.settle()
        rule = harm(self, world)
        for talk in (self.first, self.second):
            world.say(talk)
        self.unharmed(world, rule, "save")
        for talk in (self.first, self.second):
            assert world.say(talk).hits == len(talk.tokens) - 110 - 1, "the rows are still in memory"
        known = len(self.first.tokens) - 1
        reopened = self.rest(world, flush=False)
        self.restarted(reopened, known)

    def evict(
        self,
        harm: Callable[[Scene, World], Rule | None],
        done: Callable[[World], bool] | None = None,
        quiet: int = 0,
    ) -> None:
        """Play four conversations in turns, in a host tier, and soon a disk tier, that hold less than all four.

        `done`: when the fault counts as met, where it is no rule. `quiet`: so many, from the first on, say nothing meanwhile.
        """
        world = self.open(**EVICT)
        talks = [self.first, self.second, self.talk("Bob"), self.talk("Eve")]
        for _ in range(2):
            for talk in talks:
                world.say(talk, 60, 12)
        world.settle()
        rule = harm(self, world)
        met = done or (lambda world: rule is not None and rule.hits > 0)
        talking = iter(4 * talks[quiet:])
        while not met(world):
            speaker = next(talking, None)
            assert speaker is not None, "the fault was never met"
            world.say(speaker, 60, 12)
            world.settle()
        self.unharmed(world, rule, "evict")
        for talk in talks:
            world.say(talk, 60, 12)
        self.rest(world, flush=False, **EVICT)

    def unharmed(self, world: World, rule: Rule | None, phase: str) -> None:
        """The fault was met and ends now: tell its effect on writes, and on later reads of the written rows."""
        world.settle()
        if rule is not None:
            self.hit(rule, phase)
        self.tell("the rows are not stored" if world.scheduler.stats().counters.store_failures else "")
        self.counted(world)
        if not world.store.stats().hung:
            world.check_budgets()
            self.tell_check(self.check())
        self.recover(world)
        world.later(31)  # the disk was left alone for a while, perhaps
        bad = self.truth().bad
        records = [record for record in admin.list_extents(self.namespace) if record.id in bad]
        for talk in self.talks:
            if any(record.salt == talk.salt and record.tokens in pack(talk.tokens) for record in records):
                world.scheduler.drop_contexts()
                world.scheduler.drop_clean_host()
                known = len(talk.tokens) - 1
                missed = world.say(talk, 60, 12).hits < known
                if not self.brief:
                    self.tell("its next reader misses" if missed else "its next reader does not notice")
                self.counted(world)

    def start(self, harm: Callable[[Scene], Rule | None], whose: int = 0) -> None:
        """A server starts on what another one has left. `whose` conversation was harmed."""
        self.take_prepared()
        rule = harm(self)
        known = len(self.first.tokens) - 1
        try:
            world = self.open()
        except (StoreError, ConfigError) as error:
            named = str(self.folder) in str(error)
            self.tell(f"the start is refused, {'' if named else 'without '}naming the folder")
            self.recover()
            world = self.open()
        else:
            self.tell("starts")
        stats = world.store.stats()
        self.tell("the catalog was rebuilt" if stats.catalog_rebuilds else "")
        jobs = [world.say(self.first), world.say(self.second)]
        self.served(jobs[whose], known)
        if rule is not None:
            assert rule.hits, "the fault was never met"
        self.counted(world)
        self.recover(world)
        self.tell("orphans were swept" if world.store.stats().orphans_swept else "")
        self.rest(world, flush=True)

    # ------------------------------------------------------------------------------------------------ endings

    def rest(self, world: World, flush: bool, **options: Any) -> World:
        """The fault is over: both halves and the files agree, and a restart serves right rows. The new engine."""
        self.recover(world)
        world.check_budgets()
        self.check()
        world.close(flush)
        named = self.check()
        if not any("`cache check`" in told for told in self.story):
            self.tell_check(named)
        if named:
            self.repair()
        self.timeout = TIMEOUT
        reopened = self.open(**options)
        reopened.settle()
        return reopened

    def restarted(self, world: World, known: int) -> None:
        """Play the first turn after a restart; tell whether rows were lost."""
        hits = world.say(self.first).hits
        self.tell(
            "after a restart: all rows" if hits == known else "after a restart: rows before it, the rest is computed"
        )
        assert hits > 0

    def end(self) -> None:
        """Play a last turn of every conversation and a last check, and end all threads."""
        if self._ended:
            return
        self._ended = True
        last = self.worlds[-1]
        for talk in self.talks:
            last.say(talk)
        last.settle()
        last.check_budgets()
        last.close()
        self.check()

    def truth(self, namespace: Path | None = None) -> Truth:
        return Library([*self.talks, *self.ahead]).truth(namespace or self.namespace)

    def check(self) -> set[str]:
        """Expect that `cache check` tells the truth; return the kinds of problems that it names."""
        report = admin.check(self.namespace)
        truth = self.truth()
        named: dict[str, set[str]] = {}
        for problem in report.problems:
            named.setdefault(problem.kind, set()).add(problem.name)
        assert ("catalog" in named) == truth.catalog, report.problems
        inside = named.get("damaged", set()) | named.get("id", set()) | (named.get("differs", set()) & truth.bad)
        assert inside == truth.bad, report.problems
        assert named.get("row", set()) | (named.get("differs", set()) - truth.bad) == truth.row, report.problems
        assert named.get("orphan", set()) == truth.orphan, report.problems
        assert named.get("missing", set()) == truth.missing, report.problems
        if holder(self.namespace) is None:
            assert named.get("leftover", set()) == truth.leftover, report.problems
        return set(named)

    def repair(self) -> None:
        """What `cache check --repair` makes of a copy is sound."""
        copy = self.folder.with_name(f"{self.folder.name}-repaired")
        shutil.copytree(self.namespace, copy)
        admin.check(copy, repair=True)
        assert not admin.check(copy).problems
        truth = self.truth(copy)
        assert not any([truth.bad, truth.orphan, truth.missing, truth.leftover, truth.row, truth.catalog])
        shutil.rmtree(copy)


def of(path: Path) -> Callable[[Call], bool]:
    """Calls about one file."""
    return lambda call: call.path == str(path)


def extents(call: Call) -> bool:
    """Calls about extents' files, whole or being written."""
    return call.extent


def whole_extents(call: Call) -> bool:
    return call.extent and call.path.endswith(".safetensors")


def first_pieces(call: Call) -> bool:
    """The first write of each extent, which brings its header."""
    return call.extent and call.args[2] == 0


def statement(text: str) -> Callable[[Call], bool]:
    return lambda call: str(call.args[0]).startswith(text)
