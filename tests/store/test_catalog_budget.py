"""The disk budget counts every file of the namespace: extents, catalog, and what SQLite keeps beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from afterglow.store.database.catalog import Catalog, budget
from afterglow.store.database.connection import size_of
from tests.store.store_kit import record


@pytest.mark.parametrize("rows", [1, 64, 1024])
def test_a_full_catalog_stays_in_its_share(tmp_path, rows):
    """As many extents as the budget allows, replaced twice: rows come and go, the file does not grow for ever."""
    total, block_file = 64 * 1024**2, 12 * 1024
    blocks = -(-rows // 64)
    count = budget(total, block_file) // (block_file * blocks)
    catalog = Catalog(tmp_path / "catalog.sqlite")
    catalog.load()
    names = [f"{n:064x}" for n in range(3 * count)]
    template = record(1, rows)
    largest = 0
    for start in range(0, 3 * count, 100):
        for name in names[start : start + 100]:
            catalog.add(replace(template, id=name, parent=name), name)
        if start >= count:
            catalog.remove(names[start - count : start - count + 100])
        largest = max(largest, size_of(catalog.path))
    catalog.close()
    assert count * blocks * block_file + largest <= total
