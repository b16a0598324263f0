"""What jobs have in common, against a search of all pairs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from afterglow.plan.batching.compose import Sharer, shares
from afterglow.plan.batching.job import Job
from afterglow.plan.options import UNLIMITED
from afterglow.plan.prefix.salts import client_salt
from afterglow.plan.prefix.shared_prefixes import OPERATOR, SharedPrefix
from afterglow.plan.step import JobSpec, Share
from tests.plan.fake_executor import pack


def sharer(job: int, tokens: list[int], salt: str = "", rows: int | None = None, head: int = UNLIMITED) -> Sharer:
    return Sharer(job, client_salt(salt), salt, pack(tokens), len(tokens) if rows is None else rows, head=head)


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


def test_prompts_that_were_cut_share_the_rows_before_the_first_that_was_left_out() -> None:
    head, same = [1] * 8, [2] * 9
    cut = [sharer(i, [*head, *same], f"a~{i}", head=8) for i in range(2)]
    assert shares([*cut, sharer(2, [*head, *same], "a")], least=4) == (Share((0, 1, 2), 0, 8),)
    assert shares([cut[0], sharer(2, [*head, *same], "b")], least=4) == ()


def test_jobs_may_have_rows_in_common_as_far_as_their_salts_allow() -> None:
    def job(salt: str, head: int = UNLIMITED) -> Job:
        return Job(JobSpec(1, pack([1] * 9), 1, salt=salt), 1, 1, bytearray(), head=head)

    cut = job("a~x", 8)
    assert cut.most_of(job("a~x", 8)) == job("a").most_of(job("a")) == UNLIMITED
    assert cut.most_of(job("a~y", 5)) == 5
    assert cut.most_of(job("a")) == job("a").most_of(cut) == 8
    assert cut.most_of(job("b")) == job("a").most_of(job("b")) == 0
    selecting = job("a")
    selecting.approximate = True
    assert job("a").most_of(selecting) == 0


def running(number: int, salt: str, tokens: list[int], head: int = UNLIMITED) -> Job:
    return Job(JobSpec(number, pack(tokens), 1, salt=salt), number, 1, bytearray(pack(tokens)), head=head)


def test_conversations_behind_a_tenants_own_prompt_share_it_when_one_was_cut() -> None:
    prompt = [1] * 8
    own = SharedPrefix("a", pack(prompt))
    whole, cut = running(0, "a", [*prompt, 7, 7]), running(1, "a~x", [*prompt, 7, 7], 8)
    found = shares([Sharer.of(whole, 10, None, True), Sharer.of(cut, 10, own, True)], least=4)
    assert found == (Share((0, 1), 0, 8),)


def test_journals_from_before_heads_were_shared_have_the_shares_that_they_had() -> None:
    """A salt had the registered prefix in common with other salts, and was put before or behind them by its name."""
    prompt = [1] * 8
    prefix = SharedPrefix(OPERATOR, pack(prompt))
    jobs = [
        Sharer.of(running(0, "a", [*prompt, 7, 7]), 10, prefix, False),
        Sharer.of(running(1, "a~x", [*prompt, 8, 8], 8), 4, prefix, False),
        Sharer.of(running(2, "a~x", [*prompt, 9, 9], 8), 8, prefix, False),
    ]
    assert shares(jobs, least=4) == (Share((0, 1, 2), 0, 4),)
    alone = [Sharer.of(running(i, f"a~{i}", [*prompt, 7, 7], 8), 10, None, False) for i in range(2)]
    assert shares(alone, least=4) == ()


HEADS = {"0": UNLIMITED, "0~a": 5, "0~b": 3, "1": UNLIMITED, "1~c": 0}


def in_common(a: Sharer, b: Sharer) -> int:
    """Count the rows that two jobs have in common, as their salts allow it."""
    most = min(a.rows, b.rows)
    if a.salt != b.salt:
        most = min(most, a.head, b.head) if a.salt[0] == b.salt[0] else 0
    return next((i for i in range(most) if a.tokens[4 * i : 4 * i + 4] != b.tokens[4 * i : 4 * i + 4]), most)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=12), st.sampled_from([*HEADS])), min_size=1, max_size=7),
    st.integers(1, 4),
)
def test_every_pair_shares_what_it_has_in_common(texts: list[tuple[list[int], str]], least: int) -> None:
    jobs = [sharer(i, text, salt, head=HEADS[salt]) for i, (text, salt) in enumerate(texts)]
    found = shares(jobs, least)
    for share in found:
        assert share.stop - share.start >= least
        assert len(share.jobs) > 1
        assert all(in_common(jobs[i], jobs[j]) >= share.stop for i in share.jobs for j in share.jobs)
    for job in range(len(jobs)):  # a job's shares lie end to end from the first row on, the outer one first
        own = [share for share in found if job in share.jobs]
        assert [share.start for share in own] == [0, *(share.stop for share in own[:-1])][: len(own)]
        assert all(set(inner.jobs) <= set(outer.jobs) for outer, inner in zip(own, own[1:], strict=False))
    for a in jobs:
        for b in jobs:
            if a.job < b.job:
                common = in_common(a, b)
                shared = max((share.stop for share in found if {a.job, b.job} <= set(share.jobs)), default=0)
                assert shared <= common
                assert common - shared < least, "no more than a piece too short is left out"
