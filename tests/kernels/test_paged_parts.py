"""Tables of attention on a device: how many sizes of them there are."""

from __future__ import annotations

import random

import torch

from afterglow.engine.decode_pass import BATCHES, MOST_PASSES
from afterglow.kernels.paged_parts import PagedPart, PartLists, TableSizes

DATA = torch.empty(1, 2, 8, 64, 128, dtype=torch.bfloat16)


def of_contexts(rows: list[int]) -> PartLists:
    """Tables of a step that decodes alone, with contexts of so many rows."""
    parts = [PagedPart(DATA, [0] * -(-stop // 64), 0, stop, (row,), (1, 1, 1), True) for row, stop in enumerate(rows)]
    return PartLists(parts, 4, DATA)


def test_a_server_whose_batch_goes_up_and_down_has_few_sizes_of_passes() -> None:
    """So that none of its graphs is given up for another one."""
    rng = random.Random(0)
    found: set[tuple[int, TableSizes]] = set()
    for _ in range(3000):
        contexts = [rng.randrange(500, 1500) for _ in range(rng.randint(1, 128))]
        most = next(each for each in BATCHES if len(contexts) <= each)
        tables = of_contexts(contexts)
        sizes = tables.sizes.rounded(most)
        assert all(room >= there for room, there in zip(sizes, tables.sizes, strict=True))
        assert len(tables.numbers(sizes)) == sizes.total
        assert sizes.total <= 4 * tables.sizes.total
        found.add((most, sizes))
    assert len(found) <= 22 < MOST_PASSES


def test_rows_that_many_queries_read_have_room() -> None:
    shared = PagedPart(DATA, [0] * 32, 0, 2048, range(100), (1, 1, 1))
    own = [PagedPart(DATA, [0] * 8, 320, 500, (row,), (1, 1, 1), True) for row in range(100)]
    tables = PartLists([shared, *own], 4, DATA)
    sizes = tables.sizes.rounded(128)
    assert all(room >= there for room, there in zip(sizes, tables.sizes, strict=True))
    assert len(tables.numbers(sizes)) == sizes.total
