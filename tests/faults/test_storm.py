"""Everything at once, at random: faults in any call, damage to any file, several jobs at a time, restarts.

What one fault does in one place `test_matrix` says; here is what must hold whatever comes together: no wrong row, no
failed request, no hang, and afterwards a cache that is what `cache check` says it is.
"""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import FILE_BYTES, SHORT, Talk, World, flip, small_pieces
from tests.faults.scenes import Scene
from tests.faults.syscalls import Call, Rule, Syscalls, error, slow

CALLS = ("open", "preadv", "pwritev", "rename", "sql")  # a removal that fails is not played yet, see `test_matrix`


def storm(rng: random.Random, chance: float) -> Rule:
    """Any call about an extent or the catalog may fail, be late or hang for longer than the time-out."""
    acts = [error(errno.EIO), error(errno.ENOSPC), slow(0.02), slow(1.4 * SHORT)]
    weights = [8, 8, 8, 1]

    def chosen(call: Call) -> bool:
        if call.name == "sql" and not str(call.args[0]).startswith(("INSERT", "COMMIT")):
            return False
        return (call.extent or call.name == "sql") and rng.random() < chance

    return Rule(CALLS, lambda call: rng.choices(acts, weights)[0](call), chosen)


def options_of(rng: random.Random) -> dict[str, Any]:
    return {
        "policy": rng.choice(["lookahead", "lookahead", "lru", "fifo", "lfu"]),
        "write_policy": rng.choice(["write_back", "write_through", "write_through_selective"]),
        "source": rng.choice(["load", "auto"]),
        "max_batch": rng.choice([1, 2, 4]),
        "host_slots": rng.choice([16, 24, 60]),
        "device_rows": rng.choice([640, 1536]),
        "disk_bytes": rng.choice([6, 20, 80]) * FILE_BYTES[1],
        "timeout": SHORT,
    }


def turn(rng: random.Random, world: World, talks: list[Talk]) -> None:
    """Some of the conversations go on, at the same time."""
    for talk in rng.sample(talks, rng.randint(1, len(talks))):
        if len(talk.tokens) < 450:
            world.submit(talk, rng.randint(1, 90), rng.randint(1, 20))
        for _ in range(rng.randint(0, 4)):
            world.step()
    world.finish()


def live(folder: Path, seed: int, restarts: int) -> None:
    rng = random.Random(seed)
    with Syscalls(folder) as calls, small_pieces():
        scene = Scene(folder / "cache", folder, calls)
        scene.talks = talks = [Talk(name, rng.choice("ab")) for name in ("Ada", "Ada", "Bob", "Eve", "Zoe")]
        for one, other in zip(talks, talks[1:], strict=False):
            other.salt = other.salt if one.name != other.name else {"a": "b", "b": "a"}[one.salt]
        hits = 0
        for _ in range(restarts):
            world = scene.open(**options_of(rng))
            rule = calls.add(storm(rng, rng.choice([0.02, 0.1, 0.3])))
            for _ in range(4):
                turn(rng, world, talks)
                files = sorted(scene.namespace.glob("extents/*/*.safetensors"))
                if files and rng.random() < 0.5:
                    world.settle()
                    files = [file for file in files if file.exists()]
                    for file in rng.sample(files, min(len(files), 2)):
                        flip(file, rng.randrange(file.stat().st_size))
            world.settle()
            hits += rule.hits
            calls.clear()
            world.settle(hung=False)
            world.later(31)
            scene.check()
            if rng.random() < 0.5:
                world.close()
            world.abandon()
            scene.check()
        assert hits
        scene.open()
        scene.end()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(3))
def test_storm(tmp_path: Path, seed: int) -> None:
    live(tmp_path, seed, restarts=2)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 160))
def test_long_storm(tmp_path: Path, seed: int) -> None:
    live(tmp_path, seed, restarts=4)
