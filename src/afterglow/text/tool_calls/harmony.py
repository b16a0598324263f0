"""Channels, as gpt-oss writes its replies: analysis, final, and commentary with calls."""

from __future__ import annotations

import re

from afterglow.text.tool_calls.json_calls import is_json
from afterglow.text.tool_calls.parts import ReplyParser, before_mark

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def address(header: str) -> tuple[str | None, str | None]:
    """Read a header's channel, and the tool that its message calls."""
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    return channel and channel.group(1), recipient and recipient.group(1)


class HarmonyParser(ReplyParser):
    """Messages with headers: `<|channel|>NAME to=functions.TOOL <|constrain|>json<|message|>TEXT<|end|>`.

    The prompt ends with `<|start|>assistant`, so the reply begins within a header. Without tools no message is a call.
    """

    _header = ""
    _kind = ""  # of the message that is read; empty within a header

    def _read(self, text: str) -> None:
        self._buffer.text += text
        while not self.complete:
            if self._kind:
                read, mark = self._buffer.take_until(ENDS)
                self._body(read)
                if mark is None:
                    return
                if self._kind == "call":
                    self._close()
                self._kind, self._header = "", ""
            else:
                read, mark = self._buffer.take_until((MESSAGE,))
                self._header += read
                if mark is None:
                    return
                self._open()

    def _open(self) -> None:
        channel, recipient = address(self._header)
        if recipient is not None and self.tools:
            self._kind = "call"
            self._begin(recipient)
        else:
            self._kind = channel or "final"

    def _body(self, text: str) -> None:
        if self._kind == "call":
            self._argue(text)
        elif self._kind == "analysis":
            self._reason(text)
        else:
            self._content(text)

    def _end(self) -> None:
        if self._kind == "call":
            self._argue(before_mark(self._buffer.text, ENDS))
            if is_json(self.calls[-1].arguments):
                self._close()
        elif self._kind:
            self._body(self._buffer.text)
        else:
            rest = self._header + self._buffer.text
            if CHANNEL not in rest and not rest.lstrip().startswith(START):  # a reply without channels
                self._content(rest)
