"""Who asks what, and when: turns of conversations as lengths and token identities, without any text.

A token string is a few segments of pseudo-random *streams*. Two prompts share a prefix exactly where their segments name
the same rows of the same streams, so that system prompts, repeated histories and the block hashes of recorded traces keep
their identity, and a turn costs a few words of memory however long its history is. `token_bytes` makes the ids.

A `Workload` merges conversations in order of time. The caller drives it:

    for arrival in workload.take(now): ...          submit them
    workload.finished(arrival.turn.session, now)    its next turn may now be due
    workload.peek()                                 when to look again, None: after the next `finished`, or never
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b, shake_128
from heapq import heappop, heappush
from itertools import count
from typing import Literal, NamedTuple

from afterglow.errors import ConfigError
from afterglow.request import Breakpoint

Pace = Literal["closed", "open"]

# How streams are made; another value makes other tokens.
CHUNK = 1024  # tokens that are made at once
HEAD = 8  # bytes at their beginning that are a hash of the stream's name
POOL = 2**20  # tokens that the rest is taken from
REMEMBERED = 100_000  # conversations between two lines of a trace whose last end is known


class StreamSegment(NamedTuple):
    """Tokens [start, start + length) of a stream."""

    stream: str
    start: int
    length: int


def tokens_in(segments: Iterable[StreamSegment]) -> int:
    """Length of a token string."""
    return sum(segment.length for segment in segments)


def token_bytes(segments: Iterable[StreamSegment], bits: int = 32) -> bytes:
    """A token string as the plan wants it: uint32 little-endian, the same for the same rows of the same stream.

    Ids are made for being compared, and quickly: a chunk of a stream begins with a hash of its name, and goes on somewhere
    in one pool of random ids. `bits`: ids are below 2^bits, for replaying on an engine whose vocabulary is that large;
    chance matches are rarer the more there are.
    """
    if not 1 <= bits <= 32:
        raise ValueError(f"token ids have 1 to 32 bits, not {bits}")
    pool = _pool()
    parts: list[bytes | memoryview] = []
    for stream, start, length in segments:
        stop = start + length
        for chunk in range(start // CHUNK, -(-stop // CHUNK)):
            first = 4 * max(0, start - chunk * CHUNK)
            last = 4 * min(CHUNK, stop - chunk * CHUNK)
            made = blake2b(f"{chunk} {stream}".encode(), digest_size=16).digest()
            at = 4 * (int.from_bytes(made[HEAD:], "little") % (POOL - CHUNK))
            if first < HEAD:
                parts.append(made[first : min(HEAD, last)])
            parts.append(pool[at + max(HEAD, first) : at + max(HEAD, last)])
    found = b"".join(parts)
    if bits == 32:
        return found
    mask = ((1 << bits) - 1).to_bytes(4, "little") * (len(found) // 4)
    return (int.from_bytes(found, "little") & int.from_bytes(mask, "little")).to_bytes(len(found), "little")


@cache
def _pool() -> memoryview:
    return memoryview(shake_128(b"afterglow tokens").digest(4 * POOL))


def token_ids(segments: Iterable[StreamSegment], bits: int = 32) -> array[int]:
    """The same as numbers: one token string, or the reply that an executor gives token by token."""
    ids = array("I", token_bytes(segments, bits))
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def joined(segments: Iterable[StreamSegment]) -> tuple[StreamSegment, ...]:
    """The same tokens in as few segments as there can be: no empty ones, neighbours put together."""
    found: list[StreamSegment] = []
    for segment in segments:
        if not segment.length:
            continue
        if found and found[-1].stream == segment.stream and found[-1].start + found[-1].length == segment.start:
            found[-1] = found[-1]._replace(length=found[-1].length + segment.length)
        else:
            found.append(segment)
    return tuple(found)


def part_of(segments: Iterable[StreamSegment], start: int, length: int) -> tuple[StreamSegment, ...]:
    """Tokens [start, start + length) of a token string, or as many tokens as there are."""
    found: list[StreamSegment] = []
    for segment in segments:
        if length <= 0:
            break
        if start >= segment.length:
            start -= segment.length
            continue
        taken = min(segment.length - start, length)
        found.append(
            segment if taken == segment.length else StreamSegment(segment.stream, segment.start + start, taken)
        )
        start, length = 0, length - taken
    return tuple(found)


def common_tokens(a: Iterable[StreamSegment], b: Iterable[StreamSegment]) -> int:
    """Length of the longest common prefix, chance matches of different streams aside."""
    found = 0
    ours, theirs = (s for s in a if s.length), (s for s in b if s.length)
    one, other = next(ours, None), next(theirs, None)
    while one is not None and other is not None:
        if (one.stream, one.start) != (other.stream, other.start):
            break
        same = min(one.length, other.length)
        found += same
        one = next(ours, None) if same == one.length else StreamSegment(one.stream, one.start + same, one.length - same)
        other = (
            next(theirs, None)
            if same == other.length
            else StreamSegment(other.stream, other.start + same, other.length - same)
        )
    return found


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One turn. `prompt`: the whole prompt with its history, as from a client that resends everything; `reply`: what the model says,
    token for token. `index` counts the turns of its session from 0.

    `arrival`: when it arrived in the trace, seconds from the trace's start, None where it has no time of its own.
    `think`: seconds between the end of the session's previous turn and this one. `turns`: prompt rows at which turns
    end, the first one the end of the system prompt (as in `JobSpec.turns`); empty where they are not known.
    `new_tokens`: prompt tokens that the previous turn, its reply included, did not have. `breakpoints`: as in `JobSpec`.
    """

    session: str
    index: int
    prompt: tuple[StreamSegment, ...]
    reply: tuple[StreamSegment, ...]
    new_tokens: int
    arrival: float | None = None
    think: float = 0.0
    turns: tuple[int, ...] = ()
    breakpoints: tuple[Breakpoint, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return tokens_in(self.prompt)

    @property
    def output_tokens(self) -> int:
        return tokens_in(self.reply)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one session, made when they are asked for; the first is due at `start`.

    `goes_on`: the trace may bring further conversations of this name, which continue it (formats with a turn per line).
    """

    name: str
    start: float
    turns: Iterable[TraceTurn]
    goes_on: bool = False


class Arrival(NamedTuple):
    """A turn that is there. `time`: since when, seconds from the trace's start."""

    time: float
    turn: TraceTurn


@dataclass(eq=False, slots=True)
class _LiveConversation:
    """A conversation that has begun and not ended."""

    name: str
    goes_on: bool
    parts: deque[Conversation] = field(default_factory=deque)
    turns: Iterator[TraceTurn] = iter(())
    start: float = 0.0  # of the part that `turns` are of
    pending: TraceTurn | None = None  # the next turn, while its time is not known
    scheduled: bool = False  # or it is
    running: int = 0
    ended: float | None = None  # when its last turn did

    def fetch(self) -> TraceTurn | None:
        while (turn := next(self.turns, None)) is None and self.parts:
            part = self.parts.popleft()
            self.turns, self.start = iter(part.turns), part.start
        return turn


class Workload:
    """Conversations, merged in order of time; holds those that have begun and not ended, and one more.

    `pace="closed"`: a turn arrives when the session's previous turn has been over for the time its user thinks, but not
    before its conversation's `start`. `"open"`: at its own time, whatever became of the previous turn; as above where it
    has none. `conversations` come in order of their starts.
    """

    def __init__(self, conversations: Iterable[Conversation], pace: Pace = "closed") -> None:
        self.pace = pace
        self.taken = 0  # turns that have arrived
        self.watch: Callable[[Arrival], object] | None = None  # called with each of them
        self._source = iter(conversations)
        self._next = next(self._source, None)
        self._due: list[tuple[float, int, _LiveConversation, TraceTurn]] = []
        self._order = count()
        self._live: dict[str, _LiveConversation] = {}
        self._ends: OrderedDict[str, float] = OrderedDict()

    @property
    def live(self) -> int:
        """Conversations that have begun and not ended."""
        return len(self._live)

    @property
    def exhausted(self) -> bool:
        """Will nothing arrive any more, and has everything been answered?"""
        return self._next is None and not self._live

    def peek(self) -> float | None:
        """When the next turn arrives, as far as known: None until a running turn ends, or for ever."""
        due = self._due[0][0] if self._due else None
        if self._next is None:
            return due
        return self._next.start if due is None else min(due, self._next.start)

    def take(self, now: float) -> list[Arrival]:
        """Take the arrivals until `now`, in order of time. Raises: ConfigError, for a trace that goes back in time."""
        found: list[Arrival] = []
        while (time := self.peek()) is not None and time <= now:
            if self._next is not None and self._next.start <= time:
                self._begin(self._next)
                continue
            time, _, live, turn = heappop(self._due)
            live.scheduled = False
            live.running += 1
            found.append(Arrival(time, turn))
            self._advance(live)
        self.taken += len(found)
        if self.watch is not None:
            for arrival in found:
                self.watch(arrival)
        return found

    def finished(self, session: str, now: float) -> None:
        """A turn of this session has ended, was refused, or failed: what follows it may come."""
        live = self._live[session]
        live.running -= 1
        live.ended = now
        self._advance(live)

    def _begin(self, part: Conversation) -> None:
        self._next = next(self._source, None)
        if self._next is not None and self._next.start < part.start:
            raise ConfigError(
                f"the trace goes back in time: {self._next.name} starts at {self._next.start:g} s, after "
                f"{part.name} at {part.start:g} s"
            )
        live = self._live.get(part.name)
        if live is None:
            live = self._live[part.name] = _LiveConversation(
                part.name, part.goes_on, ended=self._ends.pop(part.name, None)
            )
        live.parts.append(part)
        self._advance(live)

    def _advance(self, live: _LiveConversation) -> None:
        """Give the next turn its time, if there is one and it can be known."""
        if live.scheduled:
            return
        if live.pending is None:
            live.pending = live.fetch()
        turn = live.pending
        if turn is None:
            if not live.running:
                self._end(live)
            return
        fixed = self.pace == "open" and turn.arrival is not None
        if live.running and not fixed:
            return
        time = live.start
        if fixed:
            time = max(time, turn.arrival or 0.0)
        elif live.ended is not None:
            time = max(time, live.ended + turn.think)
        live.pending = None
        live.scheduled = True
        heappush(self._due, (time, next(self._order), live, turn))

    def _end(self, live: _LiveConversation) -> None:
        del self._live[live.name]
        if live.goes_on and live.ended is not None:
            self._ends[live.name] = live.ended
            if len(self._ends) > REMEMBERED:
                self._ends.popitem(last=False)
