"""Loads from disk leave out what no query is to see in layers with a sliding window, and no answer depends on it.

Host slots that have not been filled are NaN here, as are rows of new contexts: a read of one shows in all that follows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import doors
from tests.engine.conftest import FAMILIES, VOCAB, Handle, write_model
from tests.engine.test_exact_reuse import same
from tests.engine.test_windows import LONG, words

Start = Callable[..., Handle]
Models = Callable[[str], Path]


@pytest.fixture(autouse=True)
def nothing_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    doors.fill_new_contexts(monkeypatch, torch.nan)


def to_disk(handle: Handle) -> None:
    """Leave all rows on disk alone; host is full of NaN."""
    handle.engine.settle()
    handle.engine.demote("disk")
    handle.engine.parts.store.arena.view.fill(0xFF)


def loaded(handle: Handle) -> tuple[int, int]:
    """Bytes that loads have read, and left out."""
    handle.engine.settle()
    stats = handle.engine.stats()
    return stats.store.disk_read_bytes, stats.plan.counters.load_bytes_left


@pytest.mark.parametrize(("tokens", "window"), [(1000, 128), pytest.param(8000, 1024, marks=pytest.mark.long)])
def test_bytes_from_disk_follow_the_windows(start: Start, tmp_path: Path, tokens: int, window: int) -> None:
    """A window in two of three layers: of these a load reads the blocks that the window shows."""
    model = write_model({**LONG, "sliding_window": window}, tmp_path / "model")
    handle = start(model, tmp_path, host_cache=1024**2 * 16, device_cache=1024**2 * 32)
    history = words(random.Random(8), tokens)
    handle.ask(history, max_tokens=1)
    handle.engine.settle()
    extents = list(handle.engine.parts.scheduler.cache.index.extents.values())
    assert sum(extent.rows for extent in extents) >= tokens - 1
    to_disk(handle)
    reused = handle.ask([*history, 1, 2, 3], max_tokens=2)
    assert reused.cached.disk == reused.cached.total >= tokens - 1
    first_seen = reused.cached.total + 1 - window
    block = 2 * 2 * 64 * 2 * 16 * 4  # bytes in two layers: keys and values of 64 rows, two heads
    left = 0
    for extent in extents:
        before = max(0, min(first_seen - extent.first_row, extent.rows))
        left += block * (-(-extent.rows // 64) if before == extent.rows else before // 64)
    assert left == block * ((tokens + 1 - window) // 64)
    assert loaded(handle) == (sum(extent.file_bytes for extent in extents) - left, left)
    same(reused, handle.ask([*history, 1, 2, 3], reuse=False, max_tokens=2))


@pytest.mark.parametrize("family", ["gemma3_text", "gemma2", "gpt_oss", "mistral-window"])
def test_after_a_restart_every_turn_is_exact(start: Start, model_of: Models, tmp_path: Path, family: str) -> None:
    """Turns that go on, that leave the conversation earlier than a copy in host allows, and others that come together."""
    window, rng = FAMILIES[family]["sliding_window"], random.Random(family)
    handle = start(model_of(family), tmp_path)
    text = words(rng, 300)
    handle.ask(text, max_tokens=1)
    handle.engine.settle()
    handle.engine.close()
    handle = start(model_of(family), tmp_path)
    handle.engine.parts.store.arena.view.fill(0xFF)
    for _ in range(2):
        going_on = [*text, *words(rng, 10)]
        found = handle.ask(going_on)
        same(found, handle.ask(going_on, reuse=False))
        assert found.cached.disk >= 300 - 64
        assert loaded(handle)[1] > 0
        for rows in (290, 300 - window, 150, 70, 5):
            handle.engine.settle()
            handle.engine.demote("host")
            other = [*text[:rows], (text[rows] + 1) % VOCAB, *words(rng, 10)]
            found = handle.ask(other)
            assert found.cached.total >= rows
            same(found, handle.ask(other, reuse=False))
        text = going_on
        to_disk(handle)
    assert handle.engine.stats().plan.counters.damaged == 0


def test_a_copy_in_host_that_lacks_rows_is_used_by_the_next_turn(
    start: Start, model_of: Models, tmp_path: Path
) -> None:
    handle = start(model_of("gemma3_text"), tmp_path)
    text = words(random.Random(1), 300)
    handle.ask(text, max_tokens=1)
    to_disk(handle)
    handle.ask([*text, 1, 2, 3], max_tokens=1)
    before = loaded(handle)
    assert before[1] > 0
    handle.engine.demote("host")
    found = handle.ask([*text, 4, 5], max_tokens=1)
    assert found.cached.host >= 299
    assert loaded(handle) == before, "nothing was loaded again"
    handle.engine.demote("host")
    other = [*text[:100], 7, 8, 9]
    found = handle.ask(other, max_tokens=1)
    assert found.cached.disk == 100
    assert loaded(handle)[0] > before[0]
    same(found, handle.ask(other, reuse=False, max_tokens=1))


def test_files_stay_whole(start: Start, model_of: Models, tmp_path: Path) -> None:
    """After loads that left out rows, evictions and turns that hang below: every row is the one that was written."""
    handle = start(model_of("gemma3_text"), tmp_path, host_cache=1024**2, write_policy="write_through")
    rng = random.Random(3)
    texts = [words(rng, 280) for _ in range(4)]
    for text in texts:
        handle.ask(text, max_tokens=1)
    to_disk(handle)
    for _ in range(2):
        for at, text in enumerate(texts):
            texts[at] = [*text, *words(rng, 12)]
            same(handle.ask(texts[at], max_tokens=1), handle.ask(texts[at], reuse=False, max_tokens=1))
    assert loaded(handle)[1] > 0
    to_disk(handle)
    tier = doors.tier_of(handle.engine.parts.store)
    assert len([tier.verify(extent) for extent in tier.extents()]) >= 4
    for text in texts:
        for rows in (250, 130, 40):
            other = [*text[:rows], (text[rows] + 1) % VOCAB]
            found = handle.ask(other, max_tokens=1)
            assert found.cached.total == rows
            same(found, handle.ask(other, reuse=False, max_tokens=1))
