"""Checksums of what is written: in one call of the compiled kernels, equal to Python's, and the files are the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.store.extents import pieces
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.extents.head import crc32c
from afterglow.store.extents.layout import KVLayout
from tests.store.store_kit import ALIGNED, DIGEST, EIGHT_BITS, ODD, arena_of, record

needs_kernels = pytest.mark.skipif(pieces.kernels() is None, reason="nothing has been built for this machine")


@needs_kernels
@settings(deadline=None)
@given(st.sampled_from([ALIGNED, ODD, EIGHT_BITS]), st.data())
def test_one_call_sums_what_python_sums(layout: KVLayout, data: st.DataObject) -> None:
    arena = arena_of(layout, 12)
    slots = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True))
    first = data.draw(st.integers(0, arena.planes - 1))
    planes = range(first, data.draw(st.integers(first + 1, arena.planes)))
    library = pieces.kernels()
    assert library is not None
    found = pieces.sums_of(library, arena, planes, slots)
    assert list(found) == [crc32c(arena.plane(*divmod(plane, 2))[slot]) for plane in planes for slot in slots]


@needs_kernels
def test_slots_beyond_the_arena_are_refused() -> None:
    arena, library = arena_of(ALIGNED, 3), pieces.kernels()
    assert library is not None
    for planes, slots in ((range(2), [3]), (range(2), [-1]), (range(2, 5), [0])):
        with pytest.raises(IndexError, match="are not among 4 and 3"):
            pieces.sums_of(library, arena, planes, slots)


@needs_kernels
@pytest.mark.parametrize("layout", [ALIGNED, ODD, EIGHT_BITS])
@pytest.mark.parametrize("rows", [1, 64, 130])
def test_files_are_the_same_without_the_kernels(
    layout: KVLayout, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(folder: Path) -> bytes:
        arena, tier = arena_of(layout, 9), DiskTier(folder, layout, DIGEST)
        one = record(5, rows)
        tier.write(one, arena, [7, 2, 3][: layout.blocks(rows)], lambda: None)
        tier.close()
        return tier.path(one.id).read_bytes()

    built = written(tmp_path / "built")
    monkeypatch.setattr(pieces, "kernels", lambda: None)
    assert written(tmp_path / "python") == built
