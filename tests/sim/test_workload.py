"""Token identity, and who arrives when."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afterglow.errors import ConfigError
from afterglow.sim.workload.turns import (
    CHUNK,
    Conversation,
    Pace,
    StreamSegment,
    TraceTurn,
    Workload,
    common_tokens,
    joined,
    part_of,
    token_bytes,
    token_ids,
    tokens_in,
)
from tests import doors

segments = st.builds(StreamSegment, st.sampled_from(["a", "b", "a 1"]), st.integers(0, 3000), st.integers(0, 1500))


def turn(session: str, index: int = 0, arrival: float | None = None, think: float = 0.0) -> TraceTurn:
    prompt = (StreamSegment(session, 0, 10 * (index + 1)),)
    return TraceTurn(session, index, prompt, (StreamSegment(session, 10 * (index + 1), 4),), 6, arrival, think)


def single(session: str, start: float, index: int = 0, think: float = 0.0) -> Conversation:
    return Conversation(session, start, [turn(session, index, start, think)], goes_on=True)


def test_token_ids_are_a_function_of_stream_and_row() -> None:
    whole = token_bytes([StreamSegment("s", 0, 5000)])
    assert len(whole) == 20000
    for start, length in ((0, 1), (CHUNK - 1, 2), (CHUNK, CHUNK), (1234, 3000), (4999, 1), (7, 0)):
        assert token_bytes([StreamSegment("s", start, length)]) == whole[4 * start : 4 * (start + length)]
    assert token_bytes([StreamSegment("t", 0, 5000)]) != whole
    assert len(set(array("I", whole))) > 4990  # chance matches are rare


def test_token_ids_do_not_change_between_runs() -> None:
    found = token_bytes([StreamSegment("conversation 7", 1000, 100), StreamSegment("system", 0, 3)])
    assert hashlib.sha256(found).hexdigest() == "3c89c0a999294fe283f77931421b208c9f9d66107c3de47fcc6ba03cbb7e18fe"


@given(st.lists(segments, max_size=5), st.integers(1, 32))
def test_ids_can_be_kept_below_a_power_of_two(found: list[StreamSegment], bits: int) -> None:
    small, large = token_ids(found, bits), token_ids(found)
    assert list(small) == [i & (2**bits - 1) for i in large]
    assert len(small) == tokens_in(found)


@given(st.lists(segments, max_size=6), st.integers(0, 4000), st.integers(0, 4000))
def test_parts_and_joins_keep_the_tokens(found: list[StreamSegment], start: int, length: int) -> None:
    tokens = token_bytes(found)
    assert token_bytes(joined(found)) == tokens
    assert token_bytes(part_of(found, start, length)) == tokens[4 * start : 4 * (start + length)]


@given(st.lists(segments, max_size=4), st.lists(segments, max_size=4), st.lists(segments, max_size=4))
def test_common_prefixes_are_those_of_the_tokens(
    head: list[StreamSegment], one: list[StreamSegment], other: list[StreamSegment]
) -> None:
    a, b = token_ids([*head, *one]), token_ids(joined([*head, *other]))
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_tokens([*head, *one], joined([*head, *other])) == same >= tokens_in(head)


def test_neighbours_are_joined() -> None:
    assert joined(
        [StreamSegment("a", 0, 5), StreamSegment("a", 5, 0), StreamSegment("a", 5, 2), StreamSegment("b", 7, 1)]
    ) == (
        StreamSegment("a", 0, 7),
        StreamSegment("b", 7, 1),
    )


@pytest.mark.parametrize("bits", [0, 33])
def test_impossible_widths_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="1 to 32 bits"):
        token_bytes([StreamSegment("a", 0, 1)], bits)


def run(workload: Workload, seconds: float) -> list[tuple[float, str, int]]:
    """One server that takes `seconds` per turn, in order of arrival. What arrived when."""
    found, clock = [], 0.0
    while (time := workload.peek()) is not None:
        clock = max(clock, time)
        for arrival in workload.take(clock):
            assert arrival.time <= clock
            found.append((arrival.time, arrival.turn.session, arrival.turn.index))
            clock += seconds
            workload.finished(arrival.turn.session, clock)
    assert workload.exhausted
    assert workload.live == 0
    assert workload.taken == len(found)
    return found


def test_closed_turns_come_when_the_previous_is_over_and_thought_about() -> None:
    turns = [turn("a", 0), turn("a", 1, think=5.0), turn("a", 2, think=1.0)]
    conversations = [Conversation("a", 1.0, turns), Conversation("b", 7.5, [turn("b")])]
    assert run(Workload(conversations), 2.0) == [(1.0, "a", 0), (7.5, "b", 0), (8.0, "a", 1), (12.5, "a", 2)]


def test_nothing_is_due_while_the_only_turn_runs() -> None:
    workload = Workload([Conversation("a", 1.0, [turn("a", 0), turn("a", 1, think=5.0)])])
    assert workload.take(0.5) == []
    assert [a.turn.index for a in workload.take(1.0)] == [0]
    assert workload.peek() is None
    assert not workload.exhausted
    workload.finished("a", 3.0)
    assert workload.peek() == 8.0
    assert [a.time for a in workload.take(9.0)] == [8.0]
    workload.finished("a", 9.0)
    assert workload.exhausted


def test_open_turns_come_at_their_times_whatever_became_of_the_previous() -> None:
    turns = [turn("a", 0, 1.0), turn("a", 1, 3.0, 5.0), turn("a", 2, None, 5.0)]
    workload = Workload([Conversation("a", 1.0, turns)], pace="open")
    assert [a.time for a in workload.take(10.0)] == [1.0, 3.0]  # the third has no time of its own
    workload.finished("a", 20.0)
    assert workload.peek() is None
    workload.finished("a", 21.0)
    assert workload.peek() == 26.0


@pytest.mark.parametrize(("pace", "times"), [("closed", [0.0, 6.0, 20.0]), ("open", [0.0, 2.0, 20.0])])
def test_a_conversation_may_go_on_in_later_parts(pace: Pace, times: list[float]) -> None:
    """Formats with a line per turn: each line is a part, and the turns of a session keep their order."""
    parts = [single("a", 0.0), single("a", 2.0, 1, think=3.0), single("a", 20.0, 2, think=3.0)]
    workload = Workload(parts, pace)
    found = [a.time for a in workload.take(3.0)]
    workload.finished("a", 3.0)
    found += [a.time for a in workload.take(7.0)]
    for _ in range(len(found) - 1):
        workload.finished("a", 7.0)
    found += [a.time for a in workload.take(30.0)]
    workload.finished("a", 30.0)
    assert found == times
    assert workload.exhausted


def test_the_time_to_think_counts_from_an_end_long_ago() -> None:
    """A part that comes when nothing of its conversation runs any more."""
    workload = Workload([single("a", 0.0), single("b", 1.0), single("a", 2.0, 1, think=9.0)])
    workload.take(0.0)
    workload.finished("a", 1.0)
    assert [(a.time, a.turn.session) for a in workload.take(5.0)] == [(1.0, "b")]
    assert workload.peek() == 10.0


def test_going_back_in_time_is_an_error() -> None:
    workload = Workload([single("a", 5.0), single("b", 4.0)])
    with pytest.raises(ConfigError, match=r"b starts at 4 s, after a at 5 s"):
        workload.take(10.0)


def test_it_holds_no_more_than_what_is_in_flight() -> None:
    """Ten thousand conversations, few live at a time: nothing is kept or read ahead of the others."""
    read = 0

    def lazily(name: str) -> Iterator[TraceTurn]:
        return (turn(name, index, think=1.0) for index in range(3))

    def source() -> Iterator[Conversation]:
        nonlocal read
        for number in range(10_000):
            read += 1
            yield Conversation(str(number), 10.0 * number, lazily(str(number)))

    workload = Workload(source())
    most, done = 0, 0
    while (time := workload.peek()) is not None:
        for arrival in workload.take(time):
            done += 1
            workload.finished(arrival.turn.session, time)
        most = max(most, workload.live)
        assert read <= time / 10 + 2
    assert done == 30_000
    assert most <= 2
    assert sys.getsizeof(doors.due_turns(workload)) < 1000
    assert not doors.open_sessions(workload)
    assert not doors.ends_of_sessions(workload)
