"""Values that a million rows have in common are in memory once, and still read as they were written."""

from __future__ import annotations

from dataclasses import replace

from afterglow.store.database.catalog import Catalog
from afterglow.store.database.recovery import create, file_name, open_catalog
from tests.store.store_kit import extent_name, record


class Listing:
    """Stands for a folder of extents where only the names are asked for."""

    def __init__(self, *numbers):
        self._numbers = numbers

    def extents(self):
        return (str(extent_name(number)) for number in self._numbers)


def made(number, rows, size, **more):
    return replace(record(number, rows, salt="a" * 64, **more), file_bytes=size)


def written(path):
    """A catalog of four, in the order of no time and no name."""
    top = made(1, 64, 4096, last_used=64.0, hits=1)
    below = {"parent": top.id, "parent_rows": 64}
    records = [
        made(4, 64, 4096, last_used=9.0, **below),
        made(3, 64, 4096, last_used=65.0, **below),
        top,
        made(2, 64, 64, last_used=64.0, **below),
    ]
    create(path, records, file_name)
    return {item.id: item for item in records}


def test_ids_salts_times_and_sizes_are_there_once(tmp_path):
    wanted = written(tmp_path / "catalog.sqlite")
    opened = open_catalog(tmp_path / "catalog.sqlite", Listing(1, 2, 3, 4, 5))
    opened.catalog.close()
    records = opened.records
    assert {item.id: item for item in records} == wanted
    assert opened.orphans == [extent_name(5)]
    first = next(item for item in records if item.parent is None)
    for item in records:
        assert item is first or item.parent is first.id
        assert item.salt is first.salt
        assert item.kind is first.kind
    assert len({id(item.file_bytes) for item in records if item.file_bytes == 4096}) == 1
    assert len({id(item.last_used) for item in records if item.last_used == 64.0}) == 1


def test_equal_numbers_of_two_kinds_stay_what_they_are(tmp_path):
    written(tmp_path / "catalog.sqlite")
    opened = open_catalog(tmp_path / "catalog.sqlite", Listing(1, 2, 3, 4))
    opened.catalog.close()
    for item in opened.records:  # 64 rows, 64 bytes, 64.0 seconds
        assert type(item.parent_rows) is int
        assert type(item.file_bytes) is int
        assert type(item.last_used) is float


def test_records_come_least_recently_used_first(tmp_path):
    written(tmp_path / "catalog.sqlite")
    opened = open_catalog(tmp_path / "catalog.sqlite", Listing(1, 2, 3, 4))
    opened.catalog.close()
    times = [item.last_used for item in opened.records]
    assert times == sorted(times)
    assert opened.missing == opened.damaged == 0


def test_without_a_listing_the_rows_are_the_same(tmp_path):
    wanted = written(tmp_path / "catalog.sqlite")
    catalog = Catalog(tmp_path / "catalog.sqlite")
    assert {item.id: item for item in catalog.load()} == wanted
    catalog.close()
