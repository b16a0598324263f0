"""Tables of attention on a device: how many sizes of them there are."""

from __future__ import annotations

import random
from collections import Counter

import torch

from afterglow.engine import prefill_pass
from afterglow.engine.decode_pass import BATCHES, MOST_PASSES
from afterglow.engine.prefill_pass import MOST_RESULTS, ROWS, size_of
from afterglow.engine.static_pass import Size
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


def test_turns_of_any_length_have_few_sizes_of_passes() -> None:
    """Turns of 10 to 400 tokens behind up to 6,000, beside up to 32 replies."""
    rng = random.Random(0)
    found: Counter[Size] = Counter()
    for _ in range(1000):
        past, new, replies = rng.randrange(6000), rng.randint(10, 400), rng.randrange(33)
        pages = [0] * -(-(past + new) // 64)
        turn = PagedPart(DATA, pages, 0, past + new, range(replies, replies + new), (1, 1, 1), True)
        own = [
            PagedPart(DATA, [0] * 47, 0, rng.randrange(500, 3000), (row,), (1, 1, 1), True) for row in range(replies)
        ]
        most = next(each for each in ROWS if replies + new <= each)
        tables = PartLists([*own, turn], 4, DATA)
        size = size_of(most, [tables])
        assert (size is None) == (tables.sizes.results > MOST_RESULTS)
        if size is not None:
            assert all(room >= there for room, there in zip(size.tables[0], tables.sizes, strict=True))
            assert len(tables.numbers(size.tables[0])) == size.tables[0].total
            found[size] += 1
    assert len(found) < prefill_pass.MOST_PASSES
    assert sum(found.values()) - 2 * len(found) > 0.9 * sum(found.values()), "nine of ten are replayed"
