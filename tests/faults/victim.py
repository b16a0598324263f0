"""Processes that are killed with SIGKILL at one step of a write.

`python -m tests.faults.victim` reads lines of JSON, [folder, phase, how]; for each it starts a process (a copy of itself,
which saves it the imports) that does what the phase asks for and dies at the point, and prints that process's exit code.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults.harness import Talk, World, flip, path_of, place, small_pieces
from tests.faults.scenes import EVICT, VICTIM, extents, statement, whole_extents
from tests.faults.syscalls import (
    Act,
    Call,
    Rule,
    Syscalls,
    kill_after,
    kill_before,
    kill_half_way,
)

SURVIVED = 3  # the exit code of a process that was not killed


@dataclass(frozen=True)
class Point:
    """Where a process dies. `before`: what its cache directory is like when it starts (see `test_kill`)."""

    phase: str
    how: str
    name: str
    act: Act
    match: Callable[[Call], bool] = lambda call: True
    skip: int = 0
    before: str = "empty"
    bug: str = ""  # why the test fails today


def temporary(call: Call) -> bool:
    return call.extent and "/.tmp-" in call.path


def catalogs(call: Call) -> bool:
    return "catalog" in call.path


def descriptions(call: Call) -> bool:
    return "afterglow.json" in call.path


def commits_of_inserts(said: list[str]) -> Callable[[Call], bool]:
    """COMMITs of transactions that enter rows and delete none; `said`: their statements so far."""

    def match(call: Call) -> bool:
        word = str(call.args[0]).split()[0]
        if word == "BEGIN":
            said.clear()
        said.append(word)
        return word == "COMMIT" and "INSERT" in said and "DELETE" not in said

    return match


WRITING = (
    ("before the temporary file is opened", "open", kill_before, temporary, 0),
    ("temporary file opened", "open", kill_after, temporary, 0),
    ("half written", "pwritev", kill_half_way, extents, 0),
    ("all written but the last piece", "pwritev", kill_before, extents, 2),
    ("written, not yet renamed", "rename", kill_before, temporary, 0),
    ("renamed, before the catalog's row", "rename", kill_after, temporary, 0),
    ("row inserted, not yet committed", "sql", kill_after, statement("INSERT"), 0),
    ("row committed", "sql", kill_after, commits_of_inserts([]), 0),
)
POINTS = (
    Point("load", "between two layers of a read", "preadv", kill_after, extents, 1, "prepared"),
    Point("load", "damage found, its row deleted", "unlink", kill_before, whole_extents, 0, "damaged"),
    Point("load", "damage found, its file removed", "unlink", kill_after, whole_extents, 0, "damaged"),
    *(Point("save", *steps) for steps in WRITING),
    *(Point("evict", *steps) for steps in WRITING),
    Point("evict", "row to be deleted", "sql", kill_before, statement("DELETE")),
    Point("evict", "row deleted, not yet committed", "sql", kill_after, statement("DELETE")),
    Point("evict", "between row and file", "unlink", kill_before, whole_extents),
    Point("evict", "file removed", "unlink", kill_after, whole_extents),
    Point("start", "description written, not yet named", "replace", kill_before, descriptions),
    Point("start", "schema made, not yet committed", "sql", kill_after, statement("\nCREATE TABLE")),
    Point("start", "damaged catalog set aside", "rename", kill_after, catalogs, 0, "bad catalog"),
    Point("start", "rebuilding: schema made", "sql", kill_after, statement("COMMIT"), 0, "bad catalog"),
    Point("start", "rebuilding: half of the rows", "sql", kill_after, statement("INSERT"), 5, "bad catalog"),
    Point("start", "rebuilding: committed", "sql", kill_after, statement("COMMIT"), 1, "bad catalog"),
    Point("start", "sweeping orphans", "unlink", kill_after, whole_extents, 1, "orphans"),
)  # fmt: skip


def find(phase: str, how: str) -> Point:
    (point,) = [point for point in POINTS if (point.phase, point.how) == (phase, how)]
    return point


def live(folder: Path, point: Point, calls: Syscalls) -> None:
    """What the phase asks for, with the rule in place when it begins."""

    def arm() -> None:
        calls.add(Rule([point.name], point.act, point.match, point.skip))

    first = Talk("Ada", "a")
    if point.phase == "load":
        first.imagine(3)
        world = World(folder)
        if point.before == "damaged":
            victim = path_of(world.path, first)[VICTIM]
            flip(world.path / "extents" / victim.id[:2] / f"{victim.id}.safetensors", place("keys", victim.rows))
        arm()
        world.say(first)
    elif point.phase == "save":
        world = World(folder, write_policy="write_through")
        world.say(first)
        world.settle()
        arm()
        world.say(first)
    elif point.phase == "evict":
        world = World(folder, **EVICT)
        talks = [first, Talk("Ada", "b"), Talk("Bob", "Bob"), Talk("Eve", "Eve")]
        for turn in range(6):
            if turn == 2:
                world.settle()
                arm()
            for talk in talks:
                world.say(talk, 60, 12)
    else:
        arm()
        world = World(folder)
    world.settle()
    world.close(flush=False)


def die(folder: str, phase: str, how: str) -> None:
    with Syscalls(Path(folder)) as calls, small_pieces():
        live(Path(folder) / "cache", find(phase, how), calls)


def main() -> None:
    for line in sys.stdin:
        child = os.fork()  # there are no threads yet
        if child == 0:
            code = SURVIVED
            try:
                die(*json.loads(line))
            except BaseException:
                traceback.print_exc()
                code = 1
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
