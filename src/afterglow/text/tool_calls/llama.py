"""Calls as Llama 3 writes them: the reply is JSON, with or without `<|python_tag|>` before it."""

from __future__ import annotations

from collections.abc import Callable

from afterglow.text.tool_calls.json_calls import JsonCalls
from afterglow.text.tool_calls.parts import ReplyParser, Schemas

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
        while self._rest and not self.complete:
            count = self._objects.push(self._rest)
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
