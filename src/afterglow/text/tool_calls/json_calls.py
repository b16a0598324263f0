"""Calls as JSON objects: `{"name": ..., "arguments": {...}}`, read character by character."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

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
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def is_json(text: str) -> bool:
    """Tell whether a text is one JSON value: arguments that are complete."""
    try:
        json.loads(text)
    except ValueError:
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
    def inside(self) -> bool:
        """Tell whether an object has begun and not ended."""
        return self._call is not None

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
