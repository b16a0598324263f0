"""Calls by the model's own description: a `response_template`, read by transformers (extra `tools`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from afterglow.errors import ModelError
from afterglow.text.tool_calls.parts import ReplyParser, Schemas

INSTALL = "pip install 'afterglow-llm[tools]'"
_REASONING = ("reasoning_content", "reasoning", "thinking")


class TemplateParser(ReplyParser):
    """Splits a reply as a response template says. Calls go out whole, since their text may be no JSON."""

    def __init__(
        self,
        tools: Schemas,
        *,
        one_call: bool = False,
        call_id: Callable[[], str] | None = None,
        template: Mapping[str, Any],
        prompt: str = "",
    ) -> None:
        """`prompt`: the text before the reply, which may have begun a part of the reply. Raises: ModelError."""
        super().__init__(tools, one_call=one_call, call_id=call_id)
        try:
            from transformers.utils.chat_parsing import ResponseParser
        except ImportError as error:
            raise ModelError(
                f"the model's response_template is read by transformers 5.13 or later: {INSTALL}, or choose another "
                "--tool-call-parser"
            ) from error
        described: list[Any] = [
            {"type": "function", "function": {"name": n, "parameters": dict(s)}} for n, s in tools.items()
        ]
        try:
            self._parser = ResponseParser(dict(template), prefix=prompt, tools=described)
        except ValueError as error:
            raise ModelError(f"the model's response_template is not valid: {error}") from error
        self._body = ""  # of a call that is read
        self._plain = False  # the template cannot read this reply

    def _read(self, text: str) -> None:
        if self._plain:
            self._content(text)
            return
        try:
            events = self._parser.feed(text)
        except (ValueError, RecursionError):  # a call that is no JSON, or brackets alone
            self._give_up()
            return
        self._take(events)

    def _end(self) -> None:
        if self._plain:
            return
        try:
            _, events = self._parser.finalize()
        except (ValueError, RecursionError):
            self._give_up()
            return
        self._take(events)

    def _give_up(self) -> None:
        self._plain = True
        body, self._body = self._body, ""
        self._content(body)

    def _take(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            field, text = event["field"], event.get("text", "")
            if field == "tool_calls":
                self._body += text
                if event["type"] == "region_close":
                    self._body = ""
                    self._calls(event["value"])
            elif field in _REASONING:
                self._reason(text)
            elif field == "content":
                self._content(text)
            if self.complete:
                return

    def _calls(self, value: object) -> None:
        for entry in value if isinstance(value, list) else [value]:
            said = entry.get("function", entry) if isinstance(entry, Mapping) else None
            if not isinstance(said, Mapping) or not isinstance(said.get("name"), str):
                continue
            arguments = said.get("arguments")
            self._begin(said["name"])
            self._argue(arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False))
            self._close()
            if self.complete:
                return
