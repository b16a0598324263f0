"""Which tokens a policy chooses, and lists of tokens that a caller discards."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afterglow.choices import TruncationPolicy
from afterglow.errors import RequestError
from afterglow.plan.journal.replaying import replay
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.prefix.ranges import checked, complement, count, union
from afterglow.plan.prefix.truncation import SINK_TOKENS, Epochs, Rules, cut, outgrown
from afterglow.plan.step import Copy, JobSpec
from afterglow.request import ContextWindow
from tests.plan.fake_executor import pack
from tests.plan.server_kit import Server, words
from tests.plan.test_journal import Recorded

WINDOW = 100
GONE = st.lists(st.tuples(st.integers(8, 90), st.integers(1, 9)), max_size=4)
SCORES = st.lists(st.floats(0, 1000, width=32), max_size=300)


def members(ranges: tuple[tuple[int, int], ...]) -> set[int]:
    return {row for start, stop in ranges for row in range(start, stop)}


# ---------------------------------------------------------------------------------------------- the choice of rows


@given(
    st.sampled_from(["sinks_and_recent", "importance"]),
    st.integers(101, 300),
    st.integers(0, 60),
    st.floats(0.1, 0.9),
    GONE,
    SCORES,
)
def test_what_a_choice_of_tokens_promises(
    policy: TruncationPolicy, rows: int, system: int, ratio: float, gone: list[tuple[int, int]], scores: list[float]
) -> None:
    rules = Rules(ContextWindow(WINDOW), ratio, policy)
    before = union([(max(start, system), start + size) for start, size in gone])
    dropped = rules.drop(rows, (system,), before, scores)
    assert all(start < stop for start, stop in dropped)
    assert all(a[1] < b[0] for a, b in pairwise(dropped)), "sorted, and apart"
    assert members(before) <= members(dropped) <= set(range(rows))
    head = max(system, SINK_TOKENS)
    assert members(dropped).isdisjoint(set(range(head)) - members(before)), (
        "the system prompt stays, and so do the sinks"
    )
    kept = rows - count(dropped)
    assert kept <= max(rules.most, head + 1)
    assert rows - 1 not in members(dropped)


@given(st.integers(101, 300), st.integers(0, 40), SCORES)
def test_the_best_and_the_most_recent_are_kept(rows: int, system: int, scores: list[float]) -> None:
    rules = Rules(ContextWindow(WINDOW), policy="importance")
    dropped = members(rules.drop(rows, (system,), (), scores))
    if not scores:
        assert dropped == members(Rules(ContextWindow(WINDOW), policy="sinks_and_recent").drop(rows, (system,), ()))
        return
    assert rows - len(dropped) == rules.most
    assert dropped.isdisjoint(range(rows - rules.most // 2 + 1, rows)) or rows - len(scores) > rules.most // 2
    older = set(range(max(system, SINK_TOKENS), len(scores))) - set(range(rows - rules.most // 2, rows))
    for row in older - dropped:
        for lost in older & dropped:
            assert (scores[row], -row) > (scores[lost], -lost), "of equals the older stays"


def test_scores_go_by_what_was_left_before() -> None:
    rules, epochs = Rules(ContextWindow(WINDOW), policy="importance"), Epochs()
    tokens = pack(list(range(110)))
    assert outgrown(epochs, rules, "a", tokens, 1, True) == ("a", tokens)
    first = cut(epochs, rules, "a", tokens, 1, (), True, scores=[float(row) for row in range(90)])
    assert first is not None
    assert first.reason == "importance"
    kept = [*range(4), *range(64, 110)]  # 25 recent ones, and of the others those that came last
    assert first.prompt == pack(kept)
    longer = pack(list(range(170)))
    wanted = outgrown(epochs, rules, "a", longer, 1, True)
    assert wanted == (first.salt, pack([*kept, *range(110, 170)]))
    scores = [9.0 if row == 70 else 0.0 for row in kept]
    second = cut(epochs, rules, "a", longer, 1, (), True, scores=scores)
    assert second is not None
    assert second.prompt == pack([*range(4), *range(124, 170)]), "rows without a score are newer than all others"
    nearer = pack(list(range(165)))
    assert outgrown(epochs, rules, "a", nearer[: 4 * 140], 1, True) is None
    other = cut(epochs, rules, "a", nearer, 1, (), True, scores=scores + [1.0] * 40)
    assert other is not None
    assert other.prompt == pack([*range(4), 70, *range(110, 130), *range(140, 165)])


def test_without_scores_it_is_said() -> None:
    found = cut(Epochs(), Rules(ContextWindow(WINDOW), policy="importance"), "a", pack(list(range(110))), 1, (), True)
    assert found is not None
    assert found.reason == "sinks_and_recent"
    for policy in ("oldest", "sinks_and_recent"):
        assert (
            outgrown(Epochs(), Rules(ContextWindow(WINDOW), policy=policy), "a", pack(list(range(110))), 1, True)
            is None
        )


# ----------------------------------------------------------------------------------------- what a caller discards


@given(st.lists(st.tuples(st.integers(-2, 32), st.integers(-2, 32)), max_size=5), st.integers(1, 30))
def test_lists_are_taken_as_they_are_or_refused(ranges: list[tuple[int, int]], rows: int) -> None:
    good = bool(ranges) and all(0 <= start < stop <= rows for start, stop in ranges)
    try:
        found = checked(ranges, rows)
    except RequestError:
        assert not good or len(members(tuple(ranges))) == rows
        return
    assert good
    assert members(found) == members(tuple(ranges))


def conversation() -> tuple[Server, list[int]]:
    server = Server(max_model_len=200, disk_bytes=100_000, small_rows=0)  # only discarding copies
    server.ask(words(8), truncation=True)
    job = server.ask([*words(8), *words(30, 1000)], max_tokens=3, truncation=True)
    return server, server.text(job)


DISCARD = ((10, 12), (15, 16), (20, 30))


def test_all_others_are_kept_and_found_by_whoever_resends_all() -> None:
    server, text = conversation()
    job = server.ask(text, max_tokens=0, truncation=True, discard=DISCARD)
    assert server.admitted[job].dropped == 13
    assert server.computed(job) == 1
    left = [text[row] for a, b in complement(DISCARD, len(text)) for row in range(a, b)]
    assert server.executor.texts[job].tokens == left
    copied = [move for step in server.steps for move in step.moves if isinstance(move, Copy)]
    assert sum(move.rows for move in copied) == len(left) - 1
    after = server.ask([*text, *words(5, 2000)], truncation=True)
    assert sum(server.hits(after)) == len(left)
    assert server.computed(after) == 5
    for other in ({"truncation": False}, {"truncation": True, "salt": "b"}):
        assert server.admitted[server.ask([*text, *words(5, 2000)], **other)].embedded is False
    server.nothing_left_behind()


def test_what_is_still_being_saved_is_waited_for() -> None:
    server = Server(max_model_len=200)
    server.withheld = []  # rows are computed, and not yet known to be saved
    first = server.submit(words(40))
    while first not in server.ends:
        server.step()
    assert server.scheduler.knows("", pack(words(40)))
    assert not server.scheduler.knows("", pack(words(40, 500)))
    job = server.submit(words(40), max_tokens=0, truncation=True, discard=DISCARD)
    for _ in range(3):
        server.step()
    assert server.runs(job) == []
    assert server.scheduler.stats().counters.waits_prefix == 1
    server.deliver()
    server.finish()
    assert sum(server.hits(job)) == 40 - 13 - 1
    server.nothing_left_behind()


def test_a_journal_holds_lists_and_scores() -> None:
    server = Recorded(max_model_len=64, truncation_policy="importance", disk_bytes=100_000)
    server.ask(words(40), truncation=True)
    server.ask(words(40), max_tokens=0, truncation=True, discard=((6, 9), (20, 22)))
    server.ask(words(75), truncation=True, scores=tuple(float(row % 7) for row in range(40)))
    assert server.scheduler.stats().counters.truncations == 2
    (lines,) = server.journals
    replayed = list(replay(lines))
    assert [step for step, _ in replayed] == server.steps
    assert [digest for _, digest in replayed] == [step_digest(step) for step in server.steps]


@pytest.mark.parametrize("seed", range(12))
def test_anything_in_any_order(seed: int) -> None:
    """Conversations that grow, are discarded from, overflow, are cancelled and meet failing moves, in tiny tiers. Each step
    is checked; so is, by the executor, that rows are those of the tokens they are taken for."""
    rng = random.Random(seed)
    policy = rng.choice(["oldest", "oldest_tokens", "sinks_and_recent", "importance"])
    sizes = {"device_rows": 160, "host_slots": rng.randrange(16, 60), "disk_bytes": rng.choice([0, 4000, 100_000])}
    server = Server(max_model_len=64, truncation_policy=policy, **sizes)  # type: ignore[arg-type]
    server.faults.delay, server.faults.load, server.faults.store = 2, 0.1, 0.1
    texts = [words(12, 1000 * number) for number in range(4)]
    for _ in range(40):
        number = rng.randrange(4)
        texts[number] += words(rng.randrange(1, 12), rng.randrange(10**6))
        text, more = texts[number], {}
        if rng.random() < 0.5:
            starts = sorted(rng.sample(range(4, len(text) - 1), 3))
            more["discard"] = tuple(
                (start, rng.randrange(start + 1, len(text))) for start in starts[: rng.randrange(1, 4)]
            )
        if policy == "importance" and rng.random() < 0.7:
            more["scores"] = tuple(rng.random() for _ in range(rng.randrange(len(text))))
        session = rng.choice([None, "s"])
        try:
            job = server.submit(text, rng.randrange(3), truncation=True, turns=(4,), session=session, **more)
        except RequestError:
            continue  # nothing would be left, or too much
        for _ in range(rng.randrange(4)):
            server.step()
        if rng.random() < 0.1:
            server.cancel(job)
    server.faults.load = server.faults.store = 0.0
    server.nothing_left_behind()


@pytest.mark.parametrize(
    ("discard", "settings", "message"),
    [
        (((0, 9),), {}, "system prompt"),
        (((9, 50),), {}, "the context has 40 tokens"),
        (((9, 12),), {"relative_positions": False}, "learned positions"),
    ],
)
def test_what_cannot_be_discarded(
    discard: tuple[tuple[int, int], ...], settings: dict[str, bool], message: str
) -> None:
    server = Server(max_model_len=64, **settings)  # type: ignore[arg-type]
    spec = JobSpec(1, pack(words(40)), 0, truncation=True, turns=(8,), discard=discard)
    with pytest.raises(RequestError, match=message):
        server.scheduler.submit(spec, 0.0)
    assert server.scheduler.unfinished == 0
