"""What jobs have in common, against a search of all pairs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from afterglow.plan.batching.compose import Sharer, shares
from afterglow.plan.step import Share
from tests.plan.fake_executor import pack


def sharer(job: int, tokens: list[int], salt: str = "", rows: int | None = None) -> Sharer:
    return Sharer(job, salt, pack(tokens), len(tokens) if rows is None else rows)


def test_levels_nest() -> None:
    system, one, two = [1] * 8, [2] * 6, [3] * 5
    jobs = [
        sharer(0, [*system, *one, 10]),
        sharer(1, [*system, *two, 11]),
        sharer(2, [*system, *one, 12]),
        sharer(3, [*system, *two, 13]),
        sharer(4, [*system, 14]),
        sharer(5, [9] * 30),
    ]
    assert set(shares(jobs, least=4)) == {
        Share((0, 1, 2, 3, 4), 0, 8),
        Share((0, 2), 8, 14),
        Share((1, 3), 8, 13),
    }


def test_too_little_is_not_shared() -> None:
    jobs = [sharer(i, [1] * 6 + [i]) for i in range(3)]
    assert shares(jobs, least=7) == ()
    assert shares(jobs, least=6) == (Share((0, 1, 2), 0, 6),)


def test_salts_and_rows_that_are_not_there_yet() -> None:
    same = [1] * 20
    assert shares([sharer(0, same, "a"), sharer(1, same, "b")], least=4) == ()
    assert shares([sharer(0, same), sharer(1, same, rows=5)], least=4) == (Share((0, 1), 0, 5),)
    assert shares([sharer(0, same), sharer(1, same, rows=3)], least=4) == ()


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=12), st.integers(0, 1)), min_size=1, max_size=7),
    st.integers(1, 4),
)
def test_every_pair_shares_what_it_has_in_common(texts: list[tuple[list[int], int]], least: int) -> None:
    jobs = [sharer(i, text, str(salt)) for i, (text, salt) in enumerate(texts)]
    found = shares(jobs, least)
    for share in found:
        assert share.stop - share.start >= least
        assert len(share.jobs) > 1
        heads = {(jobs[j].salt, bytes(jobs[j].tokens[: 4 * share.stop])) for j in share.jobs}
        assert len(heads) == 1, "all have these rows"
        assert all(jobs[j].rows >= share.stop for j in share.jobs)
    for job in range(len(jobs)):  # a job's shares lie end to end from the first row on, the outer one first
        own = [share for share in found if job in share.jobs]
        assert [share.start for share in own] == [0, *(share.stop for share in own[:-1])][: len(own)]
        assert all(set(inner.jobs) <= set(outer.jobs) for outer, inner in zip(own, own[1:], strict=False))
    for a in jobs:
        for b in jobs:
            if a.job < b.job and a.salt == b.salt:
                common = next(
                    (i for i in range(min(a.rows, b.rows)) if a.tokens[4 * i] != b.tokens[4 * i]), min(a.rows, b.rows)
                )
                shared = max((share.stop for share in found if {a.job, b.job} <= set(share.jobs)), default=0)
                assert shared <= common
                assert common - shared < least, "no more than a piece too short is left out"
