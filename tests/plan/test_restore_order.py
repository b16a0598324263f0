"""Tokens that could be matched before a restart can be matched after it, however they were cut, branched and forgotten."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from afterglow.plan.prefix.index import Index
from tests.plan.fake_executor import pack
from tests.plan.test_restore import CAPACITY, record, restored
from tests.plan.tiers_kit import make_extent

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=12)
STEP = st.tuples(TEXT, st.integers(0, 12), st.booleans(), st.integers(0, 99))


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(STEP, max_size=14), seed=st.integers(0, 999))
@example(
    steps=[
        ([0] * 12, 0, False, 0),
        ([0, 0, 0, 1, 1], 12, False, 0),
        ([0, 0, 0, 1, 1, 2], 0, False, 0),
        ([0, 0, 0, 1, 1, 1, 1], 12, False, 0),
    ],
    seed=0,
)
def test_what_was_matched_before_is_matched_after(steps: list[tuple[list[int], int, bool, int]], seed: int) -> None:
    """Each text is inserted from some row on, as by jobs that use cached rows or compute them anew; or one is forgotten."""
    index = Index()
    for number, (text, start, forget, which) in enumerate(steps):
        extents = list(index.extents.values())
        if forget and extents:
            index.remove(extents[which % len(extents)])
            continue
        start = min(start, index.match("", pack(text)).rows)
        if start < len(text):
            index.insert(make_extent(text[start:], text[:start], serial=number), pack(text[:start]))
    index.check()
    before = {tuple(text): index.match("", pack(text)).rows for text, *_ in steps}
    records = [extent.record() for extent in index.extents.values()]
    random.Random(seed).shuffle(records)
    scheduler, useless = restored(records)
    assert useless == []
    assert {text: scheduler.cache.index.match("", pack(list(text))).rows for text in before} == before


def test_a_branch_off_the_middle_comes_before_what_goes_on_from_where_it_ends() -> None:
    """The branch ends before the extent that it hangs below. Were a text through it inserted first, it would add nothing,
    and what hangs below it would be lost."""
    assert CAPACITY.max_extent_rows >= 12
    long = record([1] * 12)
    branch = record([2, 2], long, 3)
    through = replace(record([1, 1, 1, 2, 2, 3]), id="through")
    below = record([4, 4], branch)
    scheduler, useless = restored([through, below, branch, long])
    assert useless == []
    assert scheduler.cache.index.match("", pack([1, 1, 1, 2, 2, 4, 4])).rows == 7
    assert scheduler.cache.index.match("", pack([1, 1, 1, 2, 2, 3])).rows == 6
