"""Calls as Qwen3-Coder writes them: a tag for the function and one for each parameter."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from afterglow.text.tool_calls.arguments import arguments_of, type_of, types_of
from afterglow.text.tool_calls.parts import ReplyParser, Schemas, before_mark

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END = "<function=", "</function>"
PARAMETER, STOP = "<parameter=", "</parameter>"


class QwenXmlParser(ReplyParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, with white space between.

    The tool's schema says a value's type. Strings go out as they arrive.
    """

    def __init__(self, tools: Schemas, *, one_call: bool = False, call_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, one_call=one_call, call_id=call_id)
        self._step = self._text
        self._name = ""
        self._value = ""  # of a parameter that is no string
        self._schema: Mapping[str, Any] = {}  # of the call that is read
        self._arguments = arguments_of({})
        self._types: frozenset[str] | None = None  # of the parameter that is read
        self._count = 0  # parameters of the call
        self._string = False
        self._line = False  # the value has begun, after the line break that does not count

    def _read(self, text: str) -> None:
        self._buffer.text += text
        while not self.complete and self._step():
            pass

    def _text(self) -> bool:
        content, mark = self._buffer.take_until((OPEN, FUNCTION))
        self._content(content)
        if mark == OPEN:
            self._step = self._opened
        elif mark == FUNCTION:
            self._step = self._head
        return mark is not None

    def _opened(self) -> bool:
        start = self._buffer.text.lstrip()
        if start.startswith(FUNCTION):
            self._buffer.text = start.removeprefix(FUNCTION)
            self._step = self._head
            return True
        if FUNCTION.startswith(start):
            return False
        self._content(OPEN)
        self._step = self._text
        return True

    def _head(self) -> bool:
        read, mark = self._buffer.take_until((">",))
        self._name += read
        if mark is None:
            return False
        name, self._name = self._name.strip(), ""
        self._begin(name)
        self._schema = self.tools.get(name, {})
        self._arguments = arguments_of(self._schema)
        self._count = 0
        self._argue("{")
        self._step = self._between
        return True

    def _between(self) -> bool:
        _, mark = self._buffer.take_until((PARAMETER, END, CLOSE))
        if mark == PARAMETER:
            self._step = self._key
        elif mark is not None:
            self._argue("}")
            self._close()
            self._step = self._after if mark == END else self._text
        return mark is not None

    def _after(self) -> bool:
        """Leave out the mark that follows the function's end."""
        start = self._buffer.text.lstrip()
        if len(start) < len(CLOSE) and CLOSE.startswith(start):
            return False
        if start.startswith(CLOSE):
            self._buffer.text = start.removeprefix(CLOSE)
        self._step = self._text
        return True

    def _key(self) -> bool:
        read, mark = self._buffer.take_until((">",))
        self._name += read
        if mark is None:
            return False
        key, self._name = self._name.strip(), ""
        schema = self._arguments.named.get(key, self._arguments.others)
        self._types, self._string = types_of(schema, self._schema), is_text(schema)
        self._argue((", " if self._count else "") + json.dumps(key, ensure_ascii=False) + ": " + '"' * self._string)
        self._count += 1
        self._value, self._line = "", False
        self._step = self._content_of
        return True

    def _content_of(self) -> bool:
        """Read a value, without the line breaks that the format puts around it."""
        if not self._line:
            if not self._buffer.text:
                return False
            self._buffer.text = self._buffer.text.removeprefix("\n")
            self._line = True
        read, mark = self._buffer.take_until(("\n" + STOP, STOP))
        if self._string:
            self._argue(json.dumps(read, ensure_ascii=False)[1:-1])
        else:
            self._value += read
        if mark is None:
            return False
        self._argue('"' if self._string else written(self._value, self._types))
        self._step = self._between
        return True

    def _end(self) -> None:
        if self._step == self._text:
            self._content(self._buffer.text)
        elif self._step == self._opened:
            self._content(OPEN + self._buffer.text)
        elif self._step == self._head:
            self._content(FUNCTION + self._name + self._buffer.text)
        elif self._step == self._content_of and self._string:
            rest = before_mark(self._buffer.text, ("\n" + STOP, STOP))
            self._argue(json.dumps(rest, ensure_ascii=False)[1:-1])


def is_text(schema: object) -> bool:
    """Tell whether a schema wants a string, and says so by its type."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def written(value: str, types: frozenset[str] | None = None) -> str:
    """Write a value as JSON: as it is where it is JSON, and otherwise as a string. A value of another type than its `types`, where strings are
    among those, is a string as well."""
    text = value.strip()
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        text = {"true": "true", "false": "false", "none": "null"}.get(text.lower(), "")
        if not text:
            return json.dumps(value, ensure_ascii=False)
        found = json.loads(text)
    kinds = {type_of(found), *(("integer",) if isinstance(found, int) and not isinstance(found, bool) else ())}
    if types is not None and "string" in types and not kinds & types:
        return json.dumps(value, ensure_ascii=False)
    return text
