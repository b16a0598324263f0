"""`<tool_call>` and JSON, as Hermes and Qwen write calls."""

from __future__ import annotations

from collections.abc import Callable

from afterglow.text.tool_calls.json_calls import JsonCalls
from afterglow.text.tool_calls.parts import Buffer, ReplyParser, Schemas

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ReplyParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as often as there are calls."""

    def __init__(self, tools: Schemas, *, one_call: bool = False, call_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, one_call=one_call, call_id=call_id)
        self._buffer = Buffer()
        self._objects: JsonCalls | None = None  # between the marks
        self._empty = True  # no call since the mark

    def _read(self, text: str) -> None:
        self._buffer.text += text
        while not self.complete:
            before = len(self._buffer.text)
            if self._objects is None:
                content, mark = self._buffer.take_until((OPEN,))
                self._content(content)
                if mark is None:
                    return
                self._objects, self._empty = self._list(), True
            else:
                self._inside(self._objects)
            if len(self._buffer.text) in (0, before):
                return

    def _list(self) -> JsonCalls:
        return JsonCalls(bool, self._begun, self._argue, self._close)

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
