"""Prompts that do not fit: rows left out, and KV of the rest that is found again, and by no other tenant."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afterglow.choices import TruncationPolicy
from afterglow.errors import RequestError
from afterglow.plan.prefix.ranges import complement, count, keep, ranges_of, union
from afterglow.plan.prefix.salts import tenant_of
from afterglow.plan.prefix.truncation import MAX_EPOCHS, MAX_RANGES, SINK_TOKENS, Epoch, Epochs, Rules, cut, digest_of
from afterglow.plan.step import Copy, Run
from afterglow.request import ContextWindow
from tests.plan.fake_executor import pack
from tests.plan.server_kit import Server, words

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6)


@given(RANGES, st.integers(0, 70))
def test_ranges_are_sets_of_rows(ranges: list[tuple[int, int]], rows: int) -> None:
    members = {i for a, b in ranges for i in range(a, b)}
    united = union(ranges)
    assert {i for a, b in united for i in range(a, b)} == members
    assert count(united) == len(members)
    rest = complement(united, rows)
    assert {i for a, b in rest for i in range(a, b)} == set(range(rows)) - members
    assert keep(pack(list(range(rows))), united) == pack(sorted(set(range(rows)) - members))


def test_a_discarding_list_is_checked() -> None:
    assert ranges_of([1, 2, 5], 9) == ((1, 3), (5, 6))
    assert ranges_of([], 9) == ()
    for bad in ([2, 1], [1, 1], [-1], [9], list(range(9))):
        with pytest.raises(RequestError, match="discard"):
            ranges_of(bad, 9)


# --------------------------------------------------------------------------------------------- rows left out


def test_whole_turns_go_the_oldest_first_and_never_the_system_prompt() -> None:
    rules = Rules(ContextWindow(100))
    assert rules.drop(110, (10, 30, 50, 70, 90), ()) == ((10, 70),)
    assert rules.drop(110, (0, 64, 90), ()) == ((4, 64),)  # nothing before the first turn: its first tokens stay
    assert rules.drop(110, (10, 90), ()) == ((10, 90),)  # of the last turn nothing
    assert rules.drop(110, (0, 26), ()) == ((4, 26),)  # 88 are left, and there is room for a reply
    assert rules.drop(110, (0, 25), ()) == ((0, 25),)  # a last turn that needs the window for itself and its reply


def test_without_turns_the_plain_half_of_the_window_is_kept() -> None:
    assert Rules(ContextWindow(100)).drop(110, (), ()) == ((4, 64),)
    assert Rules(ContextWindow(100)).drop(110, (10,), ()) == ((10, 70),)  # after the system prompt
    assert Rules(ContextWindow(100), ratio=0.25).drop(110, (), ()) == ((4, 39),)


@pytest.mark.parametrize("policy", get_args(TruncationPolicy))
@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.12])
def test_a_small_part_that_is_cut_leaves_room_for_the_reply(policy: TruncationPolicy, ratio: float) -> None:
    window = ContextWindow(100)
    rules = Rules(window, ratio, policy)
    for turns in ((), (10, 20, 30, 40, 50, 60, 70, 80, 90)):
        dropped = sum(stop - start for start, stop in rules.drop(99, turns, ()))
        assert window.fits(99 - dropped, 100)


def test_the_oldest_tokens_are_a_part_of_the_window_wherever_turns_end() -> None:
    rules = Rules(ContextWindow(100), policy="oldest_tokens")
    assert rules.drop(110, (10, 30, 50, 70, 105), ()) == ((10, 60),)
    assert rules.drop(110, (), ()) == ((4, 54),)
    assert rules.drop(160, (10,), ((10, 60),)) == ((10, 110),)  # the next 50
    assert rules.drop(110, (10, 40), ()) == ((10, 40),)  # of the last turn nothing
    assert rules.drop(150, (), ()) == ((4, 104),)  # 100 left would not leave room for a reply
    assert Rules(ContextWindow(100), 0.25, "oldest_tokens").drop(110, (), ()) == ((4, 29),)
    assert rules.drop(110, (10,), ((20, 30),)) == ((10, 70),)  # what a client discarded is no part of them


@given(st.integers(1, 400), st.lists(st.integers(0, 400), unique=True), RANGES)
def test_what_is_left_of_the_oldest_tokens_fits(rows: int, turns: list[int], gone: list[tuple[int, int]]) -> None:
    rules = Rules(ContextWindow(100), policy="oldest_tokens")
    turns = sorted(turn for turn in turns if turn < rows)
    out = union([(a, b) for a, b in gone if b < rows])
    dropped = rules.drop(rows, turns, out)
    first, stop = turns[0] if turns else 0, turns[-1] if len(turns) > 1 else rows - 1
    if not first and (len(turns) < 2 or rows - turns[-1] + SINK_TOKENS <= 88):
        first = min(SINK_TOKENS, rows)
    assert union([*out, *dropped]) == dropped
    assert rows - count(dropped) <= rules.window.longest(100) or union([*out, (first, stop)]) == dropped


@pytest.mark.parametrize("policy", get_args(TruncationPolicy))
def test_no_policy_drops_the_first_token(policy: TruncationPolicy) -> None:
    """Rows behind it lean on it, whatever it says: without it a reply makes no sense."""
    rules = Rules(ContextWindow(100), policy=policy)
    for turns in ((), (0,), (0, 1, 60, 90), (0, 60, 90), (1,), (1, 60, 90)):
        dropped = rules.drop(110, turns, (), [1.0] * 110)
        least = 1 if turns[:1] == (1,) else SINK_TOKENS
        assert dropped[0][0] >= least, turns


def test_sinks_and_recent() -> None:
    assert Rules(ContextWindow(100), policy="sinks_and_recent").drop(110, (), ()) == ((4, 64),)


def test_what_was_dropped_stays_dropped() -> None:
    dropped = Rules(ContextWindow(100)).drop(180, (10, 30, 50, 70, 90, 130, 160), ((10, 70),))
    assert dropped == ((10, 160),)


@given(st.integers(1, 300), st.lists(st.integers(0, 300), unique=True), st.integers(0, 40))
def test_a_cut_prompt_fits_or_is_refused(rows: int, turns: list[int], max_tokens: int) -> None:
    rules, epochs, tokens = Rules(ContextWindow(100)), Epochs(), pack(list(range(rows)))
    turns = sorted(turn for turn in turns if turn < rows)
    try:
        found = cut(epochs, rules, "a", tokens, max_tokens, turns, relative=True)
    except RequestError:
        return  # even the last turn is too long
    if found is None:
        assert rules.window.fits(rows, max_tokens)
        return
    assert rules.window.fits(len(found.prompt) // 4, max_tokens)
    assert found.dropped == rows - len(found.prompt) // 4
    assert tenant_of(found.salt) == "a"
    if rules.window.fits(len(found.prompt) // 4 + 1, max_tokens):
        again = cut(epochs, rules, "a", tokens + pack([7]), max_tokens, turns, relative=True)
        assert again is not None
        assert (again.salt, again.prompt) == (found.salt, found.prompt + pack([7]))


def test_a_second_truncation_starts_from_the_first() -> None:
    rules, epochs = Rules(ContextWindow(100)), Epochs()
    tokens = pack(list(range(110)))
    first = cut(epochs, rules, "a", tokens, 1, (10, 30, 50, 70, 90), relative=True)
    assert first is not None
    assert first.origin is not None
    assert (first.origin.salt, first.origin.kept) == ("a", ((0, 10), (70, 109))), "the last row is computed in any case"
    longer = pack(list(range(170)))
    second = cut(epochs, rules, "a", longer, 1, (10, 30, 50, 70, 90, 120, 150), relative=True)
    assert second is not None
    assert second.origin is not None
    assert second.origin.salt == first.salt
    assert second.origin.tokens == keep(longer, [(10, 70)])
    assert second.dropped == 140
    assert second.prompt == keep(longer, [(10, 150)])
    assert second.origin.kept == ((0, 10), (90, 109))


def test_epochs_are_remembered_over_a_restart_and_bounded() -> None:
    epochs = Epochs()
    for i in range(MAX_EPOCHS + 5):
        epochs.add(Epoch("t", 3, digest_of(pack([i, 2, 3])), ((0, 1),)))
    assert len(epochs) == MAX_EPOCHS
    notes = epochs.take_notes()
    assert sum(value is None for _, value in notes) == 5
    later = Epochs()
    nothing = Epoch("t", 3, digest_of(pack([7, 7, 7])), ()).packed()
    known = {key: value for key, value in notes if value is not None}
    later.recall(known | {"bad": "{", "worse": "[1]", "dropped nothing": nothing})
    assert later.find("t", pack([7, 7, 7])) is None
    assert later.find("t", pack([MAX_EPOCHS, 2, 3, 4])) is not None
    assert later.find("other", pack([MAX_EPOCHS, 2, 3, 4])) is None
    assert later.find("t", pack([MAX_EPOCHS, 2])) is None
    assert later.take_notes() == []
    later.forget_all("t")
    assert len(later) == 0


def test_epochs_of_single_tokens_are_bounded_too() -> None:
    epochs = Epochs()
    scattered = tuple((2 * i, 2 * i + 1) for i in range(1, MAX_RANGES // 4))
    for i in range(6):
        epochs.add(Epoch("t", 3, digest_of(pack([i])), scattered, "importance"))
    assert len(epochs) == 4
    (again,) = {Epoch.unpacked(text).dropped for _, text in epochs.take_notes() if text is not None}
    assert again == scattered


# --------------------------------------------------------------------------------------------- a whole scheduler

WINDOW = 64
TURNS = (8, 20, 32, 44)  # a system prompt of 8 tokens, turns of 12


def history(rows: int, conversation: int = 1) -> list[int]:
    return [*words(8, 50), *words(rows - 8, 1000 * conversation)]


def serving(**settings: object) -> Server:
    return Server(max_model_len=WINDOW, disk_bytes=100_000, small_rows=0, **settings)


def turns_of(rows: int) -> tuple[int, ...]:
    return tuple(range(8, rows - 3, 12))


def talk(server: Server, rows: int, **more: object) -> int:
    return server.ask(history(rows), truncation=True, turns=turns_of(rows), **more)


def copies(server: Server) -> list[Copy]:
    return [move for step in server.steps for move in step.moves if isinstance(move, Copy)]


def first_run(server: Server, job: int) -> Run:
    return server.runs(job)[0]


def test_the_kv_of_what_survives_is_kept() -> None:
    server = serving()
    for rows in (20, 32, 44, 56):
        talk(server, rows)
    assert copies(server) == []
    job = talk(server, 68)  # 8 + 12 * 5: does not fit
    told = server.admitted[job]
    assert told.dropped == 36
    assert told.embedded
    assert server.executor.texts[job].tokens[:-1] == [*history(68)[:8], *history(68)[44:]]
    assert sum(server.hits(job)) == 8 + 12, "the system prompt and the turn that was known"
    assert server.computed(job) == 12
    assert sum(move.rows for move in copies(server)) == 20
    server.nothing_left_behind()


def test_the_next_turn_of_a_stateless_client_goes_on_from_there() -> None:
    server = serving()
    for rows in (20, 32, 44, 56, 68):
        talk(server, rows)
    made = len(copies(server))
    job = talk(server, 80)
    assert server.admitted[job].dropped == 36
    assert sum(server.hits(job)) == 32
    assert server.computed(job) == 12
    assert len(copies(server)) == made, "what survived has been copied once"


def test_the_second_truncation_keeps_the_rest_again() -> None:
    server = serving()
    for rows in range(20, 140, 12):
        job = talk(server, rows)
        assert server.computed(job) <= 20, "never more than a turn (and at first the system prompt)"
    assert server.scheduler.stats().counters.truncations >= 4
    server.nothing_left_behind()


def test_nobody_finds_truncated_rows_in_the_prefix_index() -> None:
    server = serving()
    for rows in (20, 32, 44, 56, 68):
        talk(server, rows)
    cut_prompt = [*history(68)[:8], *history(68)[44:]]
    job = server.ask([*cut_prompt, 7])  # exactly those tokens, but never truncated
    assert sum(server.hits(job)) == 8, "of the system prompt only"


@pytest.mark.parametrize("more", [{"salt": "b"}, {"truncation": False}])
def test_only_the_same_tenant_and_only_with_truncation(more: dict[str, object]) -> None:
    server = serving()
    for rows in (20, 32, 44, 56, 68):
        talk(server, rows)
    if "salt" in more:
        job = talk(server, 80, **more)
        assert server.hits(job) == (0, 0, 0)
        assert not server.admitted[job].embedded
    else:
        with pytest.raises(RequestError, match="context"):
            server.ask(history(80), **more)


def test_it_survives_a_restart() -> None:
    server = serving()
    for rows in (20, 32, 44, 56, 68):
        talk(server, rows)
    server.restart()
    job = talk(server, 80)
    assert server.hits(job) == (0, 0, 32)
    assert server.computed(job) == 12


def test_what_survives_is_fetched_from_disk() -> None:
    server = serving()
    for rows in (20, 32, 44, 56):
        talk(server, rows)
    server.restart()
    job = talk(server, 68)
    assert server.hits(job) == (0, 0, 20)
    assert server.computed(job) == 12


def test_learned_positions_are_computed_anew_and_say_so() -> None:
    server = serving(relative_positions=False)
    for rows in (20, 32, 44, 56):
        talk(server, rows)
    job = talk(server, 68)
    told = server.admitted[job]
    assert (told.dropped, told.embedded) == (36, False)
    assert sum(server.hits(job)) == 8, "the system prompt is a prefix like any other"
    again = talk(server, 80)
    assert sum(server.hits(again)) == 32, "and so are computed rows"
    assert copies(server) == []


def test_a_copy_that_fails_costs_a_prefill() -> None:
    server = serving()
    for rows in (20, 32, 44, 56):
        talk(server, rows)
    server.faults.store = 1.0
    job = talk(server, 68)
    assert server.computed(job) == 32
    assert server.hits(job) == (0, 0, 0)
    server.faults.store = 0.0
    server.nothing_left_behind()


def test_a_job_that_is_cancelled_while_its_rows_are_copied() -> None:
    server = serving()
    for rows in (20, 32, 44, 56):
        talk(server, rows)
    server.faults.delay = 3
    job = server.submit(history(68), truncation=True, turns=turns_of(68))
    server.step()
    assert copies(server)
    server.cancel(job)
    server.nothing_left_behind()


def test_without_room_for_the_copy_the_rest_is_computed() -> None:
    server = serving(host_slots=0)
    for rows in (20, 32, 44, 56, 68):
        job = talk(server, rows)
    assert server.computed(job) == 32


def test_a_last_turn_that_does_not_fit_is_refused() -> None:
    server = serving()
    with pytest.raises(RequestError, match="shorten the system prompt or the last message"):
        server.submit(history(100), truncation=True, turns=(8, 20))
