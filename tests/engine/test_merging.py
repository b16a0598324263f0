"""Short turns that were merged: the same answers from every tier, few files, and nothing lost by kill -9."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import VOCAB, Handle
from tests.engine.test_exact_reuse import TIERS, same

Start = Callable[..., Handle]
Models = Callable[[str], Path]

TALKER = """
import random, sys
from pathlib import Path
from tests.engine.conftest import VOCAB, Handle
from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
model, folder, seed = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
cache = CacheConfig(device_cache=2**22, host_cache=2**22, disk_cache=2**26, cache_dir=folder, write_policy="write_through",
                    source="load", warm_start=False)
handle = Handle(Engine.load(model, EngineConfig(cache=cache)))
handle.engine.start()
context, rng = [], random.Random(seed)
for turn in range(20):
    context += [rng.randrange(VOCAB) for _ in range(40)]
    handle.engine.settle()
    context += handle.ask(context, max_tokens=20).tokens
    print(*context, flush=True)
"""


@pytest.fixture(scope="module")
def long_model(model_of: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The llama with a longer window."""
    folder = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(model_of("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


def files(folder: Path) -> int:
    return len(list(folder.glob("*/extents/*/*.safetensors")))


@pytest.mark.parametrize("tier", TIERS)
def test_answers_are_the_same_after_merges(start: Start, model_of: Models, tmp_path: Path, tier: str) -> None:
    rng = random.Random(tier)
    model = model_of("llama")
    handle = start(model, tmp_path)
    context: list[int] = []
    merges = 0
    for _ in range(7):
        context += [rng.randrange(VOCAB) for _ in range(40)]
        answer = handle.ask(context, max_tokens=20)
        same(answer, handle.ask(context, reuse=False, max_tokens=20))
        assert answer.cached.total == max(0, len(context) - 41)
        context += answer.tokens
        handle.engine.settle()
        merges += handle.engine.parts.scheduler.stats().counters.merges if tier == "restart" else 0
        if tier == "restart":
            handle.engine.close()
            handle = start(model, tmp_path)
        elif tier != "device":
            handle.engine.demote(tier)
    merges += handle.engine.parts.scheduler.stats().counters.merges
    assert merges >= 3


@pytest.mark.parametrize("write_policy", ["write_back", "write_through"])
def test_twenty_short_turns_leave_four_files(start: Start, long_model: Path, tmp_path: Path, write_policy: str) -> None:
    rng = random.Random(write_policy)
    handle = start(long_model, tmp_path, write_policy=write_policy)
    context: list[int] = []
    for _ in range(20):
        context += [rng.randrange(VOCAB) for _ in range(40)]
        context += handle.ask(context, max_tokens=20).tokens
        handle.engine.settle()
    stats = handle.engine.parts.scheduler.stats()
    assert stats.host_slots * 64 <= 1.2 * len(context)
    assert stats.extents <= 4
    handle.engine.close()
    assert files(tmp_path) <= 4
    handle = start(long_model, tmp_path)
    answer = handle.ask([*context, 1])
    assert answer.cached.disk == len(context) - 1
    same(answer, handle.ask([*context, 1], reuse=False))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_a_kill_while_turns_are_merged_loses_no_turn_that_was_written(
    start: Start, long_model: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    command = [sys.executable, "-c", TALKER, str(long_model), str(tmp_path), str(seed)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as talker:
        assert talker.stdout is not None
        lines = [talker.stdout.readline() for _ in range(rng.randint(3, 15))]
        time.sleep(rng.random() * 0.02)
        talker.kill()
    said = [[int(token) for token in line.split()] for line in lines]
    handle = start(long_model, tmp_path)
    answer = handle.ask([*said[-1], 1])
    assert answer.cached.total >= len(said[-2]) - 1  # the last turn was perhaps being written, or merged
    same(answer, handle.ask([*said[-1], 1], reuse=False))
