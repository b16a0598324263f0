"""The blocks of a reply as Anthropic writes them, as they grow: text, calls and thoughts, with the events of a stream, and the
tokens as Anthropic counts them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from afterglow.request import Breakpoint, Truncation
from afterglow.text.tool_calls.parts import CallDelta, Content, Part, Reasoning, ToolCall

Event = tuple[str, dict[str, Any]]  # its type and fields


class MessageContent:
    """Collects the parts of a reply as blocks. Each call returns its events, in order."""

    def __init__(self, *, thoughts_hidden: bool = False) -> None:
        """`thoughts_hidden`: blocks of thoughts are empty."""
        self.blocks: list[dict[str, Any]] = []  # that are done
        self._hidden = thoughts_hidden
        self._kind = ""  # of the block that grows; empty without one
        self._text = ""  # of a block that grows
        self._call: ToolCall | None = None  # that grows

    def add(self, parts: Iterable[Part]) -> Iterator[Event]:
        """Add parts of the reply."""
        for part in parts:
            if isinstance(part, CallDelta):
                yield from self._add_call(part)
            elif isinstance(part, Reasoning):
                yield from self._add_text("thinking", part.text)
            else:
                assert isinstance(part, Content)
                yield from self._add_text("text", part.text)

    def finish(self) -> Iterator[Event]:
        """End the block that grows."""
        if not self._kind:
            return
        if self._kind == "thinking":
            yield self._delta("signature_delta", "signature", _signature(self._text))
        yield "content_block_stop", {"index": len(self.blocks)}
        self.blocks.append(self._block(whole=True))
        self._kind, self._text, self._call = "", "", None

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if self._kind != kind:
            yield from self._begin(kind)
        self._text += text
        if kind == "text" or not self._hidden:
            yield self._delta(f"{kind}_delta", kind, text)

    def _add_call(self, part: CallDelta) -> Iterator[Event]:
        if part.first:
            yield from self._begin("tool_use", part.call)
        if part.arguments:
            yield self._delta("input_json_delta", "partial_json", part.arguments)

    def _begin(self, kind: str, call: ToolCall | None = None) -> Iterator[Event]:
        yield from self.finish()
        self._kind, self._call = kind, call
        yield "content_block_start", {"index": len(self.blocks), "content_block": self._block(whole=False)}

    def _delta(self, kind: str, field: str, text: str) -> Event:
        return "content_block_delta", {"index": len(self.blocks), "delta": {"type": kind, field: text}}

    def _block(self, *, whole: bool) -> dict[str, Any]:
        """Describe the block that grows: as it begins, or as a `whole`."""
        if self._kind == "text":
            return {"type": "text", "text": self._text}
        if self._kind == "thinking":
            shown = "" if self._hidden else self._text
            return {"type": "thinking", "thinking": shown, "signature": _signature(self._text) if whole else ""}
        assert self._call is not None
        said = _input(self._call.arguments) if whole else {}
        return {"type": "tool_use", "id": self._call.id, "name": self._call.name, "input": said}


def _signature(thought: str) -> str:
    """Name a thought. Clients must find a signature; it is not checked when it comes back."""
    return hashlib.blake2b(thought.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _input(arguments: str) -> dict[str, Any]:
    """Read the arguments of a call; of a call that is cut short, what is there. What is no object is given as text, by the name
    that Anthropic recommends."""
    for partial in ("off", "trailing-strings"):
        try:
            found = from_json(arguments, allow_partial=partial)
        except ValueError:
            continue
        if isinstance(found, dict) and _is_json(found):
            return found
    return {"INVALID_JSON": arguments} if arguments.strip() else {}


def _is_json(value: object) -> bool:
    """Check that a value can be written as JSON: a number of a thousand digits is read as infinite."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


HOUR = 3600.0  # seconds: the longer of the two lifetimes


def as_breakpoints(marked: Iterable[tuple[int, float]]) -> tuple[Breakpoint, ...]:
    """Make breakpoints of marks, (rows, seconds) each: in order, and one for each row. Marks without rows are left out."""
    longest: dict[int, float] = {}
    for rows, seconds in marked:
        if rows > 0:
            longest[rows] = max(seconds, longest.get(rows, 0.0))
    return tuple(Breakpoint(rows, longest[rows]) for rows in sorted(longest))


def moved(breakpoints: Iterable[Breakpoint], cut: Truncation | None, head: int) -> tuple[Breakpoint, ...]:
    """Move breakpoints of a prompt that was truncated behind its first `head` rows to where their tokens are now. Those within what
    was left out are left out, as is every one behind the head where more than one part may have been left out."""
    if cut is None:
        return tuple(breakpoints)
    found = []
    for each in breakpoints:
        if each.rows <= head:
            found.append((each.rows, each.ttl_s))
        elif cut.policy == "oldest" and each.rows >= head + cut.dropped:
            found.append((each.rows - cut.dropped, each.ttl_s))
    return as_breakpoints(found)


def input_usage(prompt: int, cached: int, breakpoints: Sequence[Breakpoint]) -> dict[str, Any]:
    """Split the `prompt` tokens: found in the cache, computed up to the last breakpoint, and the rest. A token up to several
    breakpoints is kept for the longest of their lifetimes."""
    last = max((each.rows for each in breakpoints), default=0)
    hours = max((each.rows for each in breakpoints if each.ttl_s >= HOUR), default=0)
    created = max(0, last - cached)
    for_an_hour = max(0, hours - cached)
    return {
        "input_tokens": prompt - cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created - for_an_hour,
            "ephemeral_1h_input_tokens": for_an_hour,
        },
    }
