"""kill -9 at every step of every write: afterwards each extent is whole or absent, and a new process serves it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults import report
from tests.faults.scenes import EVICT, Scene
from tests.faults.test_matrix import flip_magic, orphans
from tests.faults.victim import POINTS, SURVIVED, Point

ROOT = Path(__file__).parents[2]
FAULT = "kill -9"

pytestmark = pytest.mark.timeout(120)
report.expect(((FAULT, point.phase, point.how), point.bug) for point in POINTS)


@pytest.fixture(scope="module")
def kill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path, Point], None]]:
    """Let a process do what a point's phase asks for, and die there."""
    said = tmp_path_factory.mktemp("victims") / "stderr"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with (
        said.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults.victim"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as victims,
    ):

        def die(folder: Path, point: Point) -> None:
            assert victims.stdin is not None
            assert victims.stdout is not None
            print(json.dumps([str(folder), point.phase, point.how]), file=victims.stdin, flush=True)
            code = int(victims.stdout.readline())
            assert code != SURVIVED, "the point was never reached"
            assert code == -signal.SIGKILL, said.read_text()

        yield die


def arrange(scene: Scene, point: Point) -> None:
    """The cache directory before the process; the conversations as far as they are sure to have come when it dies."""
    if point.before != "empty":
        scene.take_prepared()
    if point.before == "bad catalog":
        flip_magic(scene)
    if point.before == "orphans":
        orphans(scene)
    if point.phase == "save":
        scene.first.imagine(1)
    if point.phase == "evict":
        for talk in [scene.first, scene.second, scene.talk("Bob"), scene.talk("Eve")]:
            talk.imagine(2, 60, 12)
    scene.ahead = [talk.copy().imagine(5, *((60, 12) if point.phase == "evict" else ())) for talk in scene.talks]


def left_behind(scene: Scene) -> str:
    """What the dead process has left, apart from whole extents with a row."""
    truth = scene.truth()
    bad = {"a half-written extent": truth.bad, "a row that is wrong": truth.row}
    assert not any(bad.values()), bad
    found = {
        "an orphan": truth.orphan,
        "a temporary file": truth.leftover,
        "a row without a file": truth.missing,
    }
    words = [word for word, names in found.items() if names]
    if truth.catalog:
        words.append("no readable catalog")
    return " and ".join(words) or "nothing"


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(
            point,
            id=f"{point.phase}: {point.how}",
            marks=[pytest.mark.xfail(strict=True, reason=point.bug)] if point.bug else [],
        )
        for point in POINTS
    ],
)
def test_killed(scene: Scene, kill: Callable[[Path, Point], None], point: Point) -> None:
    arrange(scene, point)
    kill(scene.folder.parent, point)
    scene.tell(f"left behind: {left_behind(scene)}" if list(scene.folder.iterdir()) else "left behind: nothing")
    options = EVICT if point.phase == "evict" else {}
    world = scene.open(**options)
    world.settle()
    stats = world.store.stats()
    scene.tell("the orphan is swept" if stats.orphans_swept else "")
    scene.tell("the catalog is rebuilt" if stats.catalog_rebuilds else "")
    assert scene.check() == set(), "what was left behind is gone"
    world.check_budgets()
    known = {talk.name + talk.salt: len(talk.tokens) - 1 for talk in scene.talks}
    jobs = [world.say(talk) for talk in scene.talks]
    if point.phase == "start":
        hits = [job.hits for job in jobs if job.talk is scene.first]
        assert hits == [known["Adaa"] if point.before != "empty" else 0], "what was on disk is still there"
        scene.tell("all that was stored is found" if hits != [0] else "")
    elif point.phase != "evict":
        assert jobs[0].hits > 0, "what was stored before is still there"
    scene.end()
    report.happened((FAULT, point.phase, point.how), scene.story)
