"""Find the parts that a reply consists of in its text."""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from afterglow.request import CallDelta, Content, Part, Reasoning, ToolCall

Schemas = Mapping[str, Mapping[str, Any]]  # the JSON schema of each tool's arguments, by the tool's name


@dataclass(slots=True)
class Buffer:
    """Text that has arrived and is not read yet."""

    text: str = ""

    def take(self, count: int) -> str:
        """Remove and return the first characters."""
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def take_until(self, marks: Collection[str]) -> tuple[str, str | None]:
        """Remove and return the text before the first mark, and the mark; without one the text that is certainly none."""
        found = first_of(self.text, marks)
        if found is None:
            return self.take(len(before_mark(self.text, marks))), None
        before = self.take(found[0])
        self.take(len(found[1]))
        return before, found[1]


class ReplyParser(ABC):
    """Splits the text of one reply into content and calls. Feed it with `push`, end with `flush`.

    `calls` grows as calls begin. The parts add up to the reply, but for the marks around calls and white space before
    them. What looks like a call and turns out to be none is content.
    """

    def __init__(self, tools: Schemas, *, one_call: bool = False, call_id: Callable[[], str] | None = None) -> None:
        """`one_call`: `complete` is set after the first call, and the rest of the reply is ignored. `call_id` makes the ids
        of calls."""
        self.tools = tools
        self._call_id = call_id or openai_id
        self.calls: list[ToolCall] = []
        self.complete = False
        self._one_call = one_call
        self._buffer = Buffer()
        self._parts: list[Part] = []
        self._space = ""  # white space after content, which is dropped if a call follows

    def push(self, text: str) -> list[Part]:
        """Add text, and return the parts that have become certain."""
        if text and not self.complete:
            self._read(text)
        return self._taken()

    def flush(self) -> list[Part]:
        """Return the parts that are still held back, where the reply has ended."""
        if not self.complete:
            self._end()
            if not self.calls:
                self._content_now(self._space)
        return self._taken()

    @abstractmethod
    def _read(self, text: str) -> None:
        """Read more text; call `_content`, `_begin`, `_argue` and `_close`."""

    @abstractmethod
    def _end(self) -> None:
        """Read what was held back."""

    # ------------------------------------------------------------------------------------ what formats call

    def _content(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._content_now(kept)

    def _content_now(self, text: str) -> None:
        if text:
            self._parts.append(Content(text))

    def _reason(self, text: str) -> None:
        if text:
            self._parts.append(Reasoning(text))

    def _begin(self, name: str) -> None:
        self._space = ""
        self.calls.append(ToolCall(self._call_id(), name))
        self._parts.append(CallDelta(len(self.calls) - 1, self.calls[-1], "", True))

    def _argue(self, text: str) -> None:
        if not text:
            return
        call = self.calls[-1]
        call.arguments += text
        self._parts.append(CallDelta(len(self.calls) - 1, call, text, False))

    def _close(self) -> None:
        """End the call: calls without arguments get an empty object."""
        call = self.calls[-1]
        if not call.arguments.strip():
            self._argue("{}")
        call.ended = True
        self.complete = self._one_call

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


def openai_id() -> str:
    """Make the id of a call."""
    return f"call_{secrets.token_hex(12)}"


def nine_characters() -> str:
    """Make the id of a call as Mistral's templates demand it."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def held(text: str, marks: Collection[str]) -> int:
    """Measure the longest end of `text` that may be the beginning of a mark."""
    longest = max(map(len, marks)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) and len(mark) > length for mark in marks):
            return length
    return 0


def before_mark(text: str, marks: Collection[str]) -> str:
    """Return a text that has been cut without its end, if that may be the beginning of a mark."""
    return text[: len(text) - held(text, marks)]


def first_of(text: str, marks: Collection[str]) -> tuple[int, str] | None:
    """Find the mark that comes first in the text, the longest where several begin there: (place, mark)."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    return (min(found)[0], min(found)[2]) if found else None
