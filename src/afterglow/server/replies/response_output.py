"""The output items of a response, as they grow: reasoning, messages and calls, with the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from afterglow.server.bodies.response_items import (
    Item,
    function_call,
    new_id,
    output_message,
    output_text,
    reasoning_item,
    reasoning_text,
)
from afterglow.text.tool_calls.parts import CallDelta, Content, Part, Reasoning, ToolCall

Event = tuple[str, dict[str, Any]]  # its type and fields


class ResponseOutput:
    """Collects the parts of a reply as items. Each call returns its events, in order."""

    def __init__(self) -> None:
        self.items: list[Item] = []  # that are done
        self._name = ""  # of the item that grows; empty without one
        self._text = ""  # of a message, or of reasoning, that grows
        self._thinking = False  # reasoning grows
        self._call: ToolCall | None = None  # that grows

    def open_message(self) -> Iterator[Event]:
        """Begin a message."""
        self._name, self._text = new_id("msg"), ""
        item = output_message(self._name, "in_progress", [])
        yield "response.output_item.added", {"output_index": len(self.items), "item": item}
        yield "response.content_part.added", {**self._place(), "part": output_text("")}

    def add(self, parts: Iterable[Part]) -> Iterator[Event]:
        """Add parts of the reply."""
        for part in parts:
            if isinstance(part, Content):
                yield from self._add_text(part.text)
            elif isinstance(part, Reasoning):
                yield from self._add_reasoning(part.text)
            elif isinstance(part, CallDelta):
                yield from self._add_call(part)

    def finish(self, status: str) -> Iterator[Event]:
        """End the item that grows; a reply without any gets an empty message."""
        if not self._name and not self.items:
            yield from self.open_message()
        yield from self._close(status)

    def _add_reasoning(self, text: str) -> Iterator[Event]:
        if not self._thinking:
            yield from self._close("completed")
            self._name, self._text, self._thinking = new_id("rs"), "", True
            item = reasoning_item(self._name, "in_progress", [])
            yield "response.output_item.added", {"output_index": len(self.items), "item": item}
            yield "response.content_part.added", {**self._place(), "part": reasoning_text("")}
        self._text += text
        yield "response.reasoning_text.delta", {**self._place(), "delta": text}

    def _add_text(self, text: str) -> Iterator[Event]:
        if self._call is not None or self._thinking:
            yield from self._close("completed")
        if not self._name:
            yield from self.open_message()
        self._text += text
        yield "response.output_text.delta", {**self._place(), "delta": text, "logprobs": []}

    def _add_call(self, part: CallDelta) -> Iterator[Event]:
        if part.first:
            yield from self._close("completed")
            self._name, self._call = new_id("fc"), part.call
            item = function_call(self._name, part.call.id, part.call.name, "", "in_progress")
            yield "response.output_item.added", {"output_index": len(self.items), "item": item}
        if part.arguments:
            place = {"item_id": self._name, "output_index": len(self.items)}
            yield "response.function_call_arguments.delta", {**place, "delta": part.arguments}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._name:
            return
        place = {"item_id": self._name, "output_index": len(self.items)}
        call = self._call
        if self._thinking:
            item = reasoning_item(self._name, status, [self._text])
            yield "response.reasoning_text.done", {**self._place(), "text": self._text}
            yield "response.content_part.done", {**self._place(), "part": item["content"][0]}
        elif call is None:
            item = output_message(self._name, status, [self._text])
            part = item["content"][0]
            yield "response.output_text.done", {**self._place(), "text": self._text, "logprobs": []}
            yield "response.content_part.done", {**self._place(), "part": part}
        else:
            ended = "completed" if call.ended else "incomplete"  # by a stop string, perhaps
            item = function_call(self._name, call.id, call.name, call.arguments, ended)
            done = {"name": call.name, "arguments": call.arguments}
            yield "response.function_call_arguments.done", {**place, **done}
        yield "response.output_item.done", {"output_index": len(self.items), "item": item}
        self.items.append(item)
        self._name, self._call, self._thinking = "", None, False

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._name, "output_index": len(self.items), "content_index": 0}
