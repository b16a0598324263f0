"""What a shutdown has no room for on disk: it is told, and is missed as evicted afterwards, not as never seen."""

from __future__ import annotations

import logging
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import VOCAB, Handle

ROWS = 250


def missed(handle: Handle) -> tuple[int, int]:
    """Prompt tokens that were computed although they were cached once, and those never seen."""
    plan = handle.engine.stats().plan
    assert plan is not None
    return plan.counters.missed_evicted, plan.counters.missed_cold


def test_what_the_disk_had_no_room_for_is_told_and_missed_as_evicted(
    start: Callable[..., Handle], model_of: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(3)
    texts = [[number, *(rng.randrange(VOCAB) for _ in range(ROWS - 1))] for number in range(12)]
    first = start(model_of("llama"), tmp_path, disk_cache=1024 * 700)
    for text in texts:
        first.ask(text, max_tokens=1)
    first.engine.settle()
    with caplog.at_level(logging.WARNING, "afterglow"):
        first.engine.close()
    (said,) = [record.message for record in caplog.records if "end with this process" in record.message]
    found = re.match(r"(\d+) tokens \((\d+) extents, \d+\.\d MB\) end with this process.*--disk-cache", said)
    assert found is not None, said
    lost = int(found[1])
    stats = first.engine.stats()
    assert stats.plan.counters.evicted_disk + stats.plan.counters.evicted_host >= int(found[2]) > 0

    again = start(model_of("llama"), tmp_path, disk_cache=1024 * 700, device_cache=1024**2 * 8)
    cached = 0
    for text in reversed(texts):
        cached += again.ask([*text, 1], max_tokens=1).cached.total
    assert (cached > 0, cached + lost) == (True, 12 * ROWS)
    assert missed(again) == (lost + lost // ROWS, cached // ROWS), "a new token is cold where all before it is cached"
    again.engine.close()
    third = start(model_of("llama"), tmp_path, disk_cache=1024 * 700)
    third.ask([19, 18, 17, 16, 15], max_tokens=1)
    assert missed(third) == (0, 5), "others are as cold as ever"


def test_where_there_is_room_nothing_is_told(
    start: Callable[..., Handle], model_of: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handle = start(model_of("llama"), tmp_path)
    handle.ask([1, 2, 3, 4] * 50, max_tokens=1)
    with caplog.at_level(logging.WARNING, "afterglow"):
        handle.engine.close()
    assert not [record.message for record in caplog.records if "end with this process" in record.message]


def test_a_disk_that_refuses_writes_is_told_as_the_reason(
    start: Callable[..., Handle], model_of: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handle = start(model_of("llama"), tmp_path)
    (folder,) = tmp_path.glob("*/extents")
    shutil.rmtree(folder)
    folder.touch()
    handle.ask([1, 2, 3, 4] * 50, max_tokens=1)
    with caplog.at_level(logging.WARNING, "afterglow"):
        handle.engine.close()
    (said,) = [record.message for record in caplog.records if "end with this process" in record.message]
    assert "could not be written to disk" in said
    assert "--disk-cache" not in said
