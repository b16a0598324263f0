"""Calls as JSON objects: `{"name": ..., "arguments": {...}}`, read character by character; as Llama 3 writes them, which is JSON with
or without `<|python_tag|>` before it, and as Hermes and Qwen do, between `<tool_call>` and `</tool_call>`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from afterglow.text.tool_calls.parts import ReplyParser, Schemas

_ARGUMENTS = ("arguments", "parameters", "args", "input")
_BETWEEN = " \t\r\n,;[]"  # between the objects of a list


class JsonCall:
    """One JSON object that may be a call.

    `begin(name)` is called when its name is known and accepted, `argue(text)` with the text of its arguments: as it
    arrives, where the name comes first. `raw` is all that was read.
    """

    def __init__(
        self, accept: Callable[[str], bool], begin: Callable[[str], None], argue: Callable[[str], None]
    ) -> None:
        self.raw = ""
        self.begun = False
        self.ended = False
        self.refused = False  # the object is no call: it has no name, or one that is not accepted
        self._accept = accept
        self._begin = begin
        self._argue = argue
        self._depth = 0
        self._string = False  # within a string,
        self._escape = False  # after a backslash in it
        self._key: str | None = None  # of the value that is read
        self._text = ""  # of the key or the value, as far as it has arrived
        self._waiting = ""  # arguments that came before the name
        self._streamed = False  # the value that is read goes out as it arrives

    def push(self, text: str) -> int:
        """Read text up to the object's end or to what makes it no call; return how many characters were read."""
        start = len(self.raw)
        for number, char in enumerate(text):
            self._read(char)
            if self.ended or self.refused:
                self.raw += text[: number + 1]
                self._flow()
                return len(self.raw) - start
        self.raw += text
        self._flow()
        return len(text)

    def _flow(self) -> None:
        """Send the arguments that have arrived."""
        if self._streamed and self._text:
            self._argue(self._text)
            self._text = ""

    def _read(self, char: str) -> None:
        if self._depth == 0:
            if char == "{":
                self._depth = 1
            else:
                self.refused = True
            return
        if self._string:
            self._text += char
            if self._escape:
                self._escape = False
            elif char == "\\":
                self._escape = True
            elif char == '"':
                self._string = False
            return
        top = self._depth == 1
        if char == '"':
            self._string = True
            self._text += char
        elif top and char == ":" and self._key is None:
            self._key, self._text = _string(self._text), ""
        elif top and char in ",}":
            self._value()
            if char == "}":
                self._depth = 0
                self._finish()
        else:
            self._depth = max(1, self._depth + (char in "{[") - (char in "}]"))
            if self._streamed or self._text or not char.isspace():
                self._text += char
        if not self._streamed and self._key in _ARGUMENTS and self.begun and self._text[:1] == "{":
            self._streamed = True

    def _value(self) -> None:
        """End a value."""
        key, text, self._key, self._text = self._key, self._text.rstrip(), None, ""
        if self._streamed:
            self._streamed = False
            self._argue(text)
        elif key == "name" and not self.begun:
            name = _string(text)
            if not name or not self._accept(name):
                self.refused = True
                return
            self.begun = True
            self._begin(name)
        elif key in _ARGUMENTS:
            inner = _string(text)  # JSON in a string: some models write it so
            self._waiting = text if inner is None else inner

    def _finish(self) -> None:
        self.ended = self.begun
        self.refused = not self.begun
        if self.begun and self._waiting and self._waiting != "null":
            self._argue(self._waiting)


def _string(text: str) -> str | None:
    """Read a JSON string; None if the text is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def is_json(text: str) -> bool:
    """Tell whether a text is one JSON value: arguments that are complete."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class JsonCalls:
    """JSON objects one after the other, in a list or not. `refused`: text that is no call has begun."""

    def __init__(
        self,
        accept: Callable[[str], bool],
        begin: Callable[[str], None],
        argue: Callable[[str], None],
        close: Callable[[], None],
    ) -> None:
        self._new: Callable[[], JsonCall] = partial(JsonCall, accept, begin, argue)
        self._close = close
        self._call: JsonCall | None = None
        self.refused = ""  # what was read of the object that is no call

    @property
    def raw(self) -> str:
        """The text of the object that has begun, if it is not known to be a call yet."""
        return self._call.raw if self._call is not None and not self._call.begun else ""

    def push(self, text: str) -> int:
        """Read objects; return how many characters were read. Reading ends at a character that can begin no object,
        and at an object that is no call."""
        at = 0
        while at < len(text):
            if self._call is None:
                if text[at] in _BETWEEN:
                    at += 1
                    continue
                if text[at] != "{":
                    return at
                self._call = self._new()
            at += self._call.push(text[at:])
            if self._call.ended:
                self._call = None
                self._close()
            elif self._call.refused:
                self.refused, self._call = self._call.raw, None
                return at
        return at


TAG = "<|python_tag|>"


class LlamaParser(ReplyParser):
    """`{"name": ..., "parameters": {...}}`, several with `;` between them.

    Without a mark any answer in JSON would look like a call, so the name must be that of a tool of the request.
    """

    def __init__(self, tools: Schemas, *, one_call: bool = False, call_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, one_call=one_call, call_id=call_id)
        self._objects = JsonCalls(tools.__contains__, self._begin, self._argue, self._close)
        self._begun = False  # the first characters are known
        self._plain = False  # the rest is content
        self._before = ""  # what was read without finding a call
        self._rest = ""

    def _read(self, text: str) -> None:
        if self._plain:
            self._content(text)
            return
        self._rest += text
        if not self._begun:
            start = self._rest.lstrip()
            if TAG.startswith(start):
                return
            self._begun = True
            if start.startswith(TAG):
                self._rest = start.removeprefix(TAG)
        while self._rest:
            count = self._objects.push(self._rest)
            if self.complete:
                return
            read, self._rest = self._rest[:count], self._rest[count:]
            self._before = "" if self.calls else self._before + read
            if self._objects.refused:
                self._give_up(self._before or self._objects.refused)
                return
            if not self._rest.startswith(TAG):
                if self._rest and not TAG.startswith(self._rest):
                    self._give_up(self._before)
                return
            self._rest = self._rest.removeprefix(TAG)

    def _give_up(self, read: str) -> None:
        self._plain = True
        rest, self._rest = self._rest, ""
        self._content(read + rest)

    def _end(self) -> None:
        if not self._plain:
            self._give_up(self._objects.raw if self.calls else self._before)


OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ReplyParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as often as there are calls."""

    _objects: JsonCalls | None = None  # between the marks
    _empty = True  # no call since the mark

    def _read(self, text: str) -> None:
        self._buffer.text += text
        while not self.complete:
            before = len(self._buffer.text)
            if self._objects is None:
                content, mark = self._buffer.take_until((OPEN,))
                self._content(content)
                if mark is None:
                    return
                self._objects = JsonCalls(bool, self._begun, self._argue, self._close)
                self._empty = True
            else:
                self._inside(self._objects)
            if len(self._buffer.text) in (0, before):
                return

    def _begun(self, name: str) -> None:
        self._empty = False
        self._begin(name)

    def _inside(self, objects: JsonCalls) -> None:
        self._buffer.take(objects.push(self._buffer.text))
        text = self._buffer.text
        if objects.refused:
            self._content(OPEN + objects.refused if self._empty else objects.refused)
            self._objects = None
        elif text.startswith(CLOSE):
            self._buffer.take(len(CLOSE))
            if self._empty:
                self._content(OPEN + CLOSE)
            self._objects = None
        elif text and not CLOSE.startswith(text):  # neither an object nor the mark
            if self._empty:
                self._content(OPEN)
            self._objects = None

    def _end(self) -> None:
        objects, rest = self._objects, self._buffer.text
        if objects is None:
            self._content(rest)
        elif not self.calls or self._empty or objects.raw:
            self._content((OPEN if self._empty else "") + objects.raw + rest)
