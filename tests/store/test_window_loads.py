"""Loads that leave out the first blocks of layers with a sliding window."""

from __future__ import annotations

import numpy as np
import pytest

from afterglow.plan.step import Load
from afterglow.store.extents.layout import KVLayout
from afterglow.store.extents.throttle import Throttle
from tests.store.store_kit import ALIGNED, EIGHT_BITS, ODD, Kit, contents, extent_name

ROWS, BLOCKS = 200, 4
SOURCE = (0, 1, 2, 3)
WIDE = KVLayout(4, 2, 8, "F32")


def load(kit, skip, slots):
    kit.moves += 1
    return kit.move(Load(kit.moves, extent_name(1), ROWS, slots, skip=skip))


@pytest.mark.parametrize("slots", [(8, 9, 10, 11), (13, 8, 10, 9)])
@pytest.mark.parametrize("skip", range(BLOCKS + 1))
@pytest.mark.parametrize(
    ("layout", "windowed"),
    [(ALIGNED, {0}), (ALIGNED, {1}), (ALIGNED, {0, 1}), (ODD, {0, 2}), (EIGHT_BITS, {1, 2}), (WIDE, {0, 1, 3})],
)
def test_the_rest_comes_and_what_is_left_out_is_not_touched(tmp_path, layout, windowed, skip, slots):
    with Kit(tmp_path, layout, slots=16, windowed=windowed) as kit:
        assert kit.put(1, ROWS, SOURCE).ok
        rows = kit.store.arena.rows
        rows[:, :, list(slots)] = 0xFF
        done = load(kit, skip, slots)
        assert done.ok
        found, wanted = (contents(kit.store.arena, which, ROWS) for which in (slots, SOURCE))
        for layer in range(layout.layers):
            out = 64 * skip if layer in windowed else 0
            assert np.array_equal(found[layer, :, out:], wanted[layer, :, out:])
            assert (found[layer, :, :out] == 0xFF).all()
        if layout.chunk_bytes % 4096 == 0:  # else whole pages are read
            assert done.bytes == layout.file_bytes(ROWS) - skip * 2 * layout.chunk_bytes * len(windowed)
        assert kit.store.stats().disk_read_bytes == done.bytes
        assert load(kit, 0, slots).ok
        assert np.array_equal(contents(kit.store.arena, slots, ROWS), wanted)


def test_what_is_read_is_verified(tmp_path):
    """Damage in a chunk that is left out shows when that is read."""
    with Kit(tmp_path, ALIGNED, slots=16, windowed={1}) as kit:
        assert kit.put(1, ROWS, SOURCE).ok
        for kv in (0, 1):
            with kit.file(1).open("r+b") as file:
                file.seek(ALIGNED.offset(ROWS, 1, kv) + ALIGNED.chunk_bytes + 5)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))
        assert load(kit, 2, (8, 9, 10, 11)).ok
        done = load(kit, 1, (8, 9, 10, 11))
        assert not done.ok
        assert done.why == "damage"
        assert done.error is not None
        assert "layer 1, keys, chunk 1" in done.error


@pytest.mark.parametrize("skip", [1, BLOCKS])
def test_a_file_that_is_not_there_is_missed(tmp_path, skip):
    with Kit(tmp_path, ALIGNED, slots=16, windowed={0, 1}) as kit:
        assert kit.put(1, ROWS, SOURCE).ok
        kit.file(1).unlink()
        assert not load(kit, skip, (8, 9, 10, 11)).ok


def test_a_slow_tier_carries_no_more(tmp_path):
    throttle = Throttle(read_bytes_per_s=1e9, write_bytes_per_s=1e9, latency_s=0)
    with Kit(tmp_path, ALIGNED, slots=16, windowed={1}, throttle=throttle) as kit:
        assert kit.put(1, ROWS, SOURCE).ok
        wanted = contents(kit.store.arena, SOURCE, ROWS)
        done = load(kit, 3, (8, 9, 10, 11))
        assert done.ok
        assert done.bytes == ALIGNED.file_bytes(ROWS) - 3 * 2 * ALIGNED.chunk_bytes
        found = contents(kit.store.arena, (8, 9, 10, 11), ROWS)
        assert np.array_equal(found[0], wanted[0])
        assert np.array_equal(found[1, :, 192:], wanted[1, :, 192:])
