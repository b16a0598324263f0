"""What the lines of traces mean. One reader per format: a line in, conversations out; hashes of blocks become streams of
tokens, so that equal tokens of the trace are equal here.

afterglow   one JSON object per turn, as `afterglow serve --record-trace` writes it (docs/format.md)
mooncake    one JSON object per request: timestamp (ms), input_length, output_length, hash_ids of 512-token blocks;
            a block stands for all tokens before it as well; no sessions
agentic     one JSON object per session of a coding agent: requests with times, lengths, hash_ids of 64-token blocks
azure       CSV: TIMESTAMP, ContextTokens, GeneratedTokens; neither sessions nor shared prefixes
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from random import Random
from typing import Any, Protocol, TypeVar

from afterglow.config import BLOCK_ROWS
from afterglow.sim.workload.trace_values import BadLine, hashes, json_object, marks, real, shown, tokens, whole
from afterglow.sim.workload.turns import (
    Conversation,
    StreamSegment,
    TraceTurn,
    common_tokens,
    joined,
    part_of,
    tokens_in,
)

T = TypeVar("T")

MOONCAKE_BLOCK = 512
SESSIONS = 100_000  # whose last turn is remembered
MIXED_BLOCKS = 250_000
AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """For formats that leave something open: how often sessions begin (per second), and the seed of when."""

    rate: float = 0.1
    seed: int = 0


class TraceReader(Protocol):
    """Reads one file, line by line. `complete_until`: conversations that start by then have all been given."""

    complete_until: float

    def read(self, line: str) -> list[Conversation]:
        """Read one line. Raises: BadLine."""
        ...


def numbered(stream: str, blocks: Sequence[int], size: int) -> tuple[StreamSegment, ...]:
    """Blocks as parts of one stream, each at its number: those that follow one another are one segment."""
    found: list[StreamSegment] = []
    first = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            found.append(StreamSegment(stream, blocks[first] * size, (index - first) * size))
            first = index
    return tuple(found)


def _remember(table: OrderedDict[str, T], key: str, value: T, most: int) -> None:
    """Put an entry at the end; forget the least recently used one."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)


# ------------------------------------------------------------------------------------------------ afterglow


@dataclass(slots=True)
class _TraceSession:
    """A session as its next turn finds it. `tail`: its tokens from `start` on, after the last block that had a hash; all
    tokens where no block has one."""

    turns: int
    tokens: int
    start: int
    tail: tuple[StreamSegment, ...]


class AfterglowReader:
    """Lines are written when turns end, and read in order of their arrivals: each says until when that is possible.

    A block that a turn completes has the tokens that it had while it was a session's incomplete last one, and others after
    them: where it ends in between two turns is known for blocks whose beginning was seen.
    """

    def __init__(self, settings: TraceSettings) -> None:
        self.complete_until = -math.inf
        self._zero: float | None = None
        self._count = 0
        self._sessions: OrderedDict[str, _TraceSession] = OrderedDict()
        self._mixed: OrderedDict[str, tuple[StreamSegment, ...]] = OrderedDict()

    def read(self, line: str) -> list[Conversation]:
        row = json_object(line)
        time = real(row, "time")
        prompt, output = tokens(row, "prompt_tokens", 1), tokens(row, "output_tokens")
        name = row.get("session")
        if name is not None and not isinstance(name, str):
            raise BadLine(f"session must be a string or null, not {shown(name)}")
        blocks = hashes(row, "block_hashes", (prompt + output) // BLOCK_ROWS, str) if "block_hashes" in row else None
        before = self._sessions.get(name) if name is not None else None
        shared = min(before.tokens, prompt - 1) if before is not None else 0
        if row.get("new_tokens") is not None:
            new = tokens(row, "new_tokens")
            if new > prompt:
                raise BadLine(f"new_tokens is {new}, more than the {prompt} of the prompt")
            shared = min(before.tokens, prompt - new) if before is not None else 0
        until = real(row, "complete_until") if row.get("complete_until") is not None else time
        think = real(row, "think_time") if row.get("think_time") is not None else 0.0

        self._count += 1
        if self._zero is None:
            self._zero = min(time, until)
        session = name if name is not None else f"request {self._count}"
        context, now = self._context(before, shared, prompt + output, blocks)
        turn = TraceTurn(
            session=session,
            index=now.turns - 1,
            prompt=joined(part_of(context, 0, prompt)),
            reply=joined(part_of(context, prompt, output)),
            new_tokens=prompt - shared,
            arrival=time - self._zero,
            think=max(0.0, think),
            breakpoints=marks(row, "breakpoints", prompt),
        )
        if name is not None:
            _remember(self._sessions, name, now, SESSIONS)
        self.complete_until = max(self.complete_until, until - self._zero)
        return [Conversation(session, time - self._zero, (turn,), goes_on=name is not None)]

    def _context(
        self, before: _TraceSession | None, shared: int, length: int, blocks: Sequence[str] | None
    ) -> tuple[tuple[StreamSegment, ...], _TraceSession]:
        """Make prompt and reply, `length` tokens, as segments, and the session to remember."""
        turns = before.turns + 1 if before is not None else 1
        own = f"turn {self._count}"
        if blocks is None:
            known = part_of(before.tail, 0, shared) if before is not None and not before.start else ()
            if known and before is not None and shared == before.tokens:  # it goes on where the session has ended
                stream, start = known[-1].stream, known[-1].start + known[-1].length
            else:
                stream, start = own, 0
            context = joined((*known, StreamSegment(stream, start, length - tokens_in(known))))
            return context, _TraceSession(turns, length, 0, context)

        first = before.start if before is not None else 0
        begun = part_of(before.tail, 0, shared - first) if before is not None else ()
        for index in range(first // BLOCK_ROWS, len(blocks)):
            if not (part := part_of(begun, index * BLOCK_ROWS - first, BLOCK_ROWS)):
                break
            if blocks[index] not in self._mixed:
                rest = StreamSegment(f"block {blocks[index]}", tokens_in(part), BLOCK_ROWS - tokens_in(part))
                _remember(self._mixed, blocks[index], joined((*part, rest)), MIXED_BLOCKS)
        end = len(blocks) * BLOCK_ROWS
        left = part_of(begun, end - first, length) if end >= first else ()
        tail = joined((*left, StreamSegment(own, 0, length - end - tokens_in(left))))
        found: list[StreamSegment] = []
        for block in blocks:
            if (mixed := self._mixed.get(block)) is not None:
                self._mixed.move_to_end(block)
                found += mixed
            else:
                found.append(StreamSegment(f"block {block}", 0, BLOCK_ROWS))
        return (*found, *tail), _TraceSession(turns, length, end, tail)


# ------------------------------------------------------------------------------------------------- mooncake


class MooncakeReader:
    """A request's last block is hashed together with its end: what follows it there in a later request, the reply at
    first, is not recognised, which costs some reuse."""

    def __init__(self, settings: TraceSettings) -> None:
        self.complete_until = -math.inf
        self._zero: float | None = None
        self._count = 0

    def read(self, line: str) -> list[Conversation]:
        row = json_object(line)
        time = real(row, "timestamp") / 1000
        prompt, output = tokens(row, "input_length", 1), tokens(row, "output_length")
        blocks = hashes(row, "hash_ids", -(-prompt // MOONCAKE_BLOCK), int)
        if len(blocks) * MOONCAKE_BLOCK < prompt:
            raise BadLine(
                f"{len(blocks)} hash_ids are for {len(blocks) * MOONCAKE_BLOCK} tokens, the input has {prompt}"
            )
        self._zero = time if self._zero is None else self._zero
        time -= self._zero
        self._count += 1
        name = f"request {self._count}"
        context = numbered("blocks", blocks, MOONCAKE_BLOCK)
        turn = TraceTurn(
            session=name,
            index=0,
            prompt=part_of(context, 0, prompt),
            reply=joined((StreamSegment(name, 0, output),)),
            new_tokens=prompt,
            arrival=time,
        )
        self.complete_until = max(self.complete_until, time)
        return [Conversation(name, time, (turn,))]


# -------------------------------------------------------------------------------------------------- agentic


class AgenticReader:
    """One session per line, whatever its id. Sessions have no times in the trace: they begin as a Poisson process.

    Hashes are a session's own. What precedes everything, tools and system prompt, is taken to be shared by the sessions in
    which it is as long. A reply is found at its place in the next request.
    """

    def __init__(self, settings: TraceSettings) -> None:
        self.complete_until = -math.inf
        self._rate = settings.rate
        self._rng = Random(f"{settings.seed} agentic arrivals")
        self._numbers = count(1)

    def read(self, line: str) -> list[Conversation]:
        row = json_object(line)
        if row.get("block_size") != BLOCK_ROWS:
            raise BadLine(f"block_size must be {BLOCK_ROWS}, not {shown(row.get('block_size'))}")
        start = max(0.0, self.complete_until) + self._rng.expovariate(self._rate)
        name = f"{row.get('id')} (session {next(self._numbers)})"
        found = list(_agents(name, name, start, row))
        if not found:
            raise BadLine("it has no requests")
        self.complete_until = start
        return found


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request of an agent. `took`: seconds until its reply was there, 0 where that is not known."""

    time: float
    think: float
    took: float
    prompt: int
    output: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """What the blocks of an agent's prompts stand for. `prefix` is what it shares with other sessions, and `first` the
    blocks of its first prompt: where a later one begins otherwise it does not begin with the prefix either."""

    stream: str
    prefix: tuple[StreamSegment, ...]
    first: Sequence[int]

    def prompt(self, asked: _Asked, own: str) -> tuple[StreamSegment, ...]:
        """A prompt; its end, which is in no block, is its own."""
        same = 0
        most = tokens_in(self.prefix) // BLOCK_ROWS
        while same < min(most, len(asked.blocks)) and asked.blocks[same] == self.first[same]:
            same += 1
        known = part_of(self.prefix, 0, same * BLOCK_ROWS)
        rest = numbered(self.stream, asked.blocks[same:], BLOCK_ROWS)
        return part_of((*known, *rest, StreamSegment(own, 0, asked.prompt)), 0, asked.prompt)


def _agents(trace: str, name: str, start: float, row: Mapping[str, Any]) -> Iterator[Conversation]:
    """An agent's conversation, and those of the agents that it started."""
    requests = row.get("requests")
    if not isinstance(requests, list):
        raise BadLine(f"requests must be a list, not {shown(requests)}")
    asked: list[_Asked] = []
    for number, request in enumerate(requests):
        if not isinstance(request, dict):
            raise BadLine(f"a request must be an object, not {shown(request)}")
        time = real(request, "t")
        if request.get("type") == "subagent":
            yield from _agents(trace, f"{name}/{request.get('agent_id')} ({number})", start + time, request)
        else:
            asked.append(_asked(request, time, asked[-1] if asked else None))
    if asked:
        tools = tokens(row, "tool_tokens") if row.get("tool_tokens") is not None else 0
        system = tokens(row, "system_tokens") if row.get("system_tokens") is not None else 0
        shared = (StreamSegment(f"tools {tools}", 0, tools), StreamSegment(f"tools {tools} system {system}", 0, system))
        first = asked[0].blocks
        whole = min((tools + system) // BLOCK_ROWS, len(first)) * BLOCK_ROWS
        blocks = _Blocks(f"{trace} blocks", part_of(shared, 0, whole), first)
        yield Conversation(name, start, _agent_turns(name, start, asked, blocks))


def _asked(row: Mapping[str, Any], time: float, before: _Asked | None) -> _Asked:
    prompt, output = tokens(row, "in", 1), tokens(row, "out")
    if before is not None and time < before.time:
        raise BadLine(f"a request at {time:g} s follows one at {before.time:g} s")
    took = real(row, "api_time") if row.get("api_time") is not None else 0.0
    if row.get("think_time") is not None:
        think = real(row, "think_time")
    else:  # the rest of the time between the two, if the other's reply is known
        think = time - before.time - before.took if before is not None else 0.0
    blocks = hashes(row, "hash_ids", -(-prompt // BLOCK_ROWS), int)
    return _Asked(time, max(0.0, think), max(0.0, took), prompt, output, blocks)


def _agent_turns(name: str, start: float, asked: list[_Asked], blocks: _Blocks) -> Iterator[TraceTurn]:
    heard: tuple[StreamSegment, ...] = ()  # what the previous turn left
    later = blocks.prompt(asked[0], f"{name} turn 0")
    for index, now in enumerate(asked):
        prompt = later
        reply: tuple[StreamSegment, ...] = ()
        if index + 1 < len(asked):
            following = asked[index + 1]
            later = blocks.prompt(following, f"{name} turn {index + 1}")
            whole = now.prompt // BLOCK_ROWS
            if following.prompt > now.prompt and following.blocks[:whole] == now.blocks[:whole]:
                prompt = part_of(later, 0, now.prompt)
                reply = part_of(later, now.prompt, now.output)
        reply = joined((*reply, StreamSegment(f"{name} reply {index}", 0, now.output - tokens_in(reply))))
        yield TraceTurn(
            session=name,
            index=index,
            prompt=prompt,
            reply=reply,
            new_tokens=now.prompt - common_tokens(heard, prompt),
            arrival=start + now.time - asked[0].time,
            think=now.think if index else 0.0,
        )
        heard = (*prompt, *reply)


# ---------------------------------------------------------------------------------------------------- azure


class AzureReader:
    """Every request is a conversation of one turn."""

    def __init__(self, settings: TraceSettings) -> None:
        self.complete_until = -math.inf
        self._zero: datetime | None = None
        self._count = 0

    def read(self, line: str) -> list[Conversation]:
        cells = [cell.strip() for cell in line.split(",")]
        if tuple(cells) == AZURE_HEADER:
            return []
        if len(cells) != len(AZURE_HEADER):
            raise BadLine(f"it has {len(cells)} cells; wanted are {', '.join(AZURE_HEADER)}")
        row = dict(zip(AZURE_HEADER[1:], map(whole, cells[1:]), strict=True))
        prompt, output = tokens(row, "ContextTokens", 1), tokens(row, "GeneratedTokens")
        try:
            when = datetime.fromisoformat(cells[0])
        except ValueError:
            raise BadLine(f"TIMESTAMP must be a date and time, not {shown(cells[0])}") from None
        when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
        if self._zero is None:
            self._zero = when
        time = (when - self._zero).total_seconds()
        self._count += 1
        name = f"request {self._count}"
        segments = StreamSegment(name, 0, prompt), StreamSegment(name, prompt, output)
        turn = TraceTurn(name, 0, joined(segments[:1]), joined(segments[1:]), new_tokens=prompt, arrival=time)
        self.complete_until = max(self.complete_until, time)
        return [Conversation(name, time, (turn,))]


# -------------------------------------------------------------------------------------- which one, and values

FORMATS: dict[str, Callable[[TraceSettings], TraceReader]] = {
    "afterglow": AfterglowReader,
    "mooncake": MooncakeReader,
    "agentic": AgenticReader,
    "azure": AzureReader,
}
_MARKS = {
    "afterglow": {"time", "prompt_tokens", "output_tokens"},
    "mooncake": {"timestamp", "input_length", "output_length", "hash_ids"},
    "agentic": {"id", "block_size", "requests"},
}


def recognise(line: str) -> str | None:
    """Recognise the format of a line. Raises: BadLine, for a line that looks like JSON and is not."""
    if tuple(cell.strip() for cell in line.split(",", 3)) == AZURE_HEADER:
        return "azure"
    if not line.startswith("{"):
        return None
    row = json_object(line)
    return next((name for name, marks in _MARKS.items() if marks <= row.keys()), None)
