"""Calls as Mistral's models write them, behind `[TOOL_CALLS]`."""

from __future__ import annotations

from collections.abc import Callable

from afterglow.text.tool_calls.json_calls import JsonCalls, is_json
from afterglow.text.tool_calls.parts import ReplyParser, Schemas, before_mark, nine_characters

MARK, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser(ReplyParser):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and the newer `[TOOL_CALLS]name[ARGS]{...}`, once for each
    call."""

    def __init__(self, tools: Schemas, *, one_call: bool = False, call_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, one_call=one_call, call_id=call_id or nine_characters)
        self._step = self._text
        self._objects = JsonCalls(bool, self._begin, self._argue, self._close)
        self._name = ""

    def _read(self, text: str) -> None:
        self._buffer.text += text
        while not self.complete and self._step():
            pass

    def _text(self) -> bool:
        content, mark = self._buffer.take_until((MARK,))
        self._content(content)
        if mark is not None:
            self._step = self._marked
        return mark is not None

    def _marked(self) -> bool:
        """Find out which form of call follows the mark."""
        start = self._buffer.text.lstrip()
        if start:
            self._step = self._json if start[0] in "[{" else self._header
            self._name = ""
        return bool(start)

    def _json(self) -> bool:
        self._buffer.take(self._objects.push(self._buffer.text))
        if self._objects.refused:
            self._content(MARK + self._objects.refused)
            self._objects.refused = ""
        elif not self._buffer.text:
            return False
        self._step = self._text
        return True

    def _header(self) -> bool:
        read, mark = self._buffer.take_until((ARGUMENTS, CALL_ID, "{"))
        self._name += read
        if mark is None:
            return False
        if mark == CALL_ID:
            self._step = self._skip_id
            return True
        self._begin(self._name.strip())
        if mark == "{":
            self._buffer.text = mark + self._buffer.text
        self._step = self._arguments
        return True

    def _skip_id(self) -> bool:
        """Leave out the id that the model made up: the call has its own."""
        _, mark = self._buffer.take_until((ARGUMENTS,))
        if mark is not None:
            self._begin(self._name.strip())
            self._step = self._arguments
        return mark is not None

    def _arguments(self) -> bool:
        read, mark = self._buffer.take_until((MARK,))
        self._argue(read)
        if mark is None:
            return False
        self._close()
        self._step = self._marked
        return True

    def _end(self) -> None:
        rest = self._buffer.text
        if self._step == self._arguments:
            self._argue(before_mark(rest, (MARK,)))
            if is_json(self.calls[-1].arguments):
                self._close()
        elif self._step == self._header:
            self._content(MARK + self._name + rest)
        elif self._step == self._json:
            self._content(self._objects.raw + rest)
        else:
            self._content(rest)
