"""Everything at once, at random: faults in any call, damage to any file, several jobs at a time, restarts.

What one fault does in one place `test_matrix` says; here is what must hold whatever comes together: no wrong row, no
failed request, no hang, no file over the budget, and afterwards a cache that is what `cache check` says it is.

A seed decides the requests, and the fault of each call; the system decides in what order threads end. So the plan's
inputs are recorded: a storm that fails says how to play them again, and how to raise the same storm.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from afterglow.plan.scheduler import Scheduler
from tests.faults.harness import FILE_BYTES, SHORT, Talk, World, flip, small_pieces
from tests.faults.replay import replay
from tests.faults.scenes import Scene
from tests.faults.syscalls import Call, Rule, Syscalls, error, slow

CALLS = ("open", "preadv", "pwritev", "rename", "sql")
# Seeds of the storms: fixed ones, and in a long run others each time, unless STORM_SEEDS names some.
NAMED = [int(seed) for seed in os.environ.get("STORM_SEEDS", "").split()]
FIXED, LONG = (NAMED, NAMED) if NAMED else (range(6), range(100, 160))
DRAWN = [] if NAMED else [int(time.time()) * 10 + number for number in range(3)]


def storm(seed: str, chance: float) -> Rule:
    """Any call about an extent or the catalog may fail, be late or hang for longer than the time-out: which, the seed
    decides, by what the call is about and how often there was such a call before."""
    acts = [error(errno.EIO), error(errno.ENOSPC), slow(0.02), slow(1.4 * SHORT)]
    weights = [8, 8, 8, 1]
    before: Counter[str] = Counter()
    lock = threading.Lock()
    drawn = threading.local()

    def chosen(call: Call) -> bool:
        what = str(call.args[0]).split()[0] if call.name == "sql" else os.path.basename(call.path)
        if call.name == "sql" and what not in ("INSERT", "COMMIT"):
            return False
        if call.name == "unlink" and not what.endswith(".safetensors"):
            return False
        if not (call.extent or call.name == "sql"):
            return False
        key = f"{call.name} {'half' if what.startswith('.') else what}"
        with lock:
            before[key] += 1
            drawn.rng = random.Random(f"{seed} {key} {before[key]}")
        return bool(drawn.rng.random() < chance)

    return Rule(CALLS, lambda call: drawn.rng.choices(acts, weights)[0](call), chosen)


def options_of(rng: random.Random) -> dict[str, Any]:
    return {
        "policy": rng.choice(["lookahead", "lookahead", "lru", "fifo", "lfu"]),
        "write_policy": rng.choice(["write_back", "write_through", "write_through_selective"]),
        "source": rng.choice(["load", "auto"]),
        "max_batch": rng.choice([1, 2, 4]),
        "host_slots": rng.choice([16, 24, 60]),
        "device_rows": rng.choice([640, 1536]),
        "disk_bytes": rng.choice([6, 20, 80]) * FILE_BYTES[1],
        "small_rows": 256,
        "timeout": SHORT,
        "patience": SHORT,
    }


def turn(rng: random.Random, world: World, talks: list[Talk]) -> None:
    """Some of the conversations go on, at the same time."""
    for talk in rng.sample(talks, rng.randint(1, len(talks))):
        if len(talk.tokens) < 450:
            world.submit(talk, rng.randint(1, 90), rng.randint(1, 20))
        for _ in range(rng.randint(0, 4)):
            world.step()
    world.finish()


def live(folder: Path, seed: int, restarts: int) -> int:
    """Returns how many calls failed or were late: none where all rows stay in memory and the process ends."""
    rng = random.Random(seed)
    with Syscalls(folder) as calls, small_pieces():
        scene = Scene(folder / "cache", folder, calls)
        try:
            return play(scene, rng, f"{seed}", restarts)
        except BaseException as failure:
            journal = folder / f"storm-{seed}.jsonl"
            journal.write_text("".join(f"{line}\n" for world in scene.worlds[-1:] for line in world.journal))
            failure.add_note(f"the plan's part of it: python -m tests.faults.replay {journal}")
            failure.add_note(f"the same storm: STORM_SEEDS={seed} python -m pytest tests/faults/test_storm.py")
            raise
        finally:
            for world in scene.worlds:
                world.abandon()


def play(scene: Scene, rng: random.Random, seed: str, restarts: int) -> int:
    scene.talks = talks = [Talk(name, rng.choice("ab")) for name in ("Ada", "Ada", "Bob", "Eve", "Zoe")]
    for one, other in zip(talks, talks[1:], strict=False):
        other.salt = other.salt if one.name != other.name else {"a": "b", "b": "a"}[one.salt]
    hits = 0
    for start in range(restarts):
        world = scene.open(**options_of(rng))
        rule = scene.calls.add(storm(f"{seed} {start}", rng.choice([0.02, 0.1, 0.3])))
        for _ in range(4):
            turn(rng, world, talks)
            files = sorted(scene.namespace.glob("extents/*/*.safetensors"))
            if files and rng.random() < 0.5:
                world.settle()
                files = [file for file in files if file.exists()]
                for file in rng.sample(files, min(len(files), 2)):
                    with suppress(FileNotFoundError):  # a call that hung may end now, and remove it
                        flip(file, rng.randrange(file.stat().st_size))
        world.settle()
        hits += rule.hits
        scene.calls.clear()
        world.settle(hung=False)
        world.later(31)
        world.settle()
        world.check_budgets()
        scene.check()
        if rng.random() < 0.5:
            world.close()
        world.abandon()
        scene.check()
    scene.open()
    scene.end()
    for world in scene.worlds:
        assert replay(world.journal), "a journal says all that the plan was told"
    return hits


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", FIXED)
def test_storm(tmp_path: Path, seed: int) -> None:
    assert live(tmp_path, seed, restarts=2) or NAMED


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [*LONG, *DRAWN])
def test_long_storm(tmp_path: Path, seed: int) -> None:
    live(tmp_path, seed, restarts=4)


def test_a_storm_that_fails_says_how_to_see_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scheduler.check

    def check(plan: Scheduler) -> None:
        assert plan.stats().extents < 4, "too many"
        real(plan)

    monkeypatch.setattr(Scheduler, "check", check)
    with pytest.raises(AssertionError, match="too many") as failure:
        live(tmp_path, 1, restarts=1)
    commands = [note.split(": ", 1)[1] for note in failure.value.__notes__]
    assert commands[1] == "STORM_SEEDS=1 python -m pytest tests/faults/test_storm.py"
    journal = Path(commands[0].removeprefix("python -m tests.faults.replay ")).read_text().splitlines()
    with pytest.raises(AssertionError, match="too many") as again:
        replay(journal)
    assert again.value.__notes__[0].startswith(f"line {len(journal)} of {len(journal)}")
    monkeypatch.undo()
    assert replay(journal)
