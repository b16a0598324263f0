"""Items of `/v1/responses`: read from clients, stored, turned into the messages of a chat, and those of a reply as they grow."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from afterglow.errors import RequestError
from afterglow.request import CallDelta, Content, Part, Reasoning, ToolCall
from afterglow.server.bodies.limits import wrong
from afterglow.text import Reply
from afterglow.text.chat_template import shown_kind

Item = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
KINDS = ("message", "reasoning", "function_call", "function_call_output")
REASONING_PARTS = ("reasoning_text", "summary_text")
PARTS = ("input_text", "output_text", "text")
_REPLY = "_reply"  # in a stored item: the ids of a reply, hidden from clients


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def read_input(value: object) -> list[Item]:
    """Read the field `input` as items with ids: messages, reasoning, calls and results of calls. Raises: RequestError, with the place
    of an item that is none of these."""
    if isinstance(value, str):
        return [_message("user", [value])]
    if not isinstance(value, list) or not value:
        raise RequestError("input must be a string or a list with at least one item", param="input")
    return [_read_item(item, f"input[{number}]") for number, item in enumerate(value)]


def _read_item(item: object, where: str) -> Item:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if not isinstance(item, Mapping) or kind not in KINDS:
        raise RequestError(
            f"{where} is {shown_kind(item)}; only items of type 'message', 'reasoning', 'function_call' and "
            "'function_call_output' are supported",
            param=where,
        )
    if kind == "reasoning":
        texts = _read_texts(item.get("content") or item.get("summary") or [], f"{where}.content", REASONING_PARTS)
        return reasoning_item(_id(item, "rs"), "completed", texts)
    if kind == "function_call":
        return _read_call(item, where)
    if kind == "function_call_output":
        texts = _read_texts(item.get("output"), f"{where}.output")
        name = _named(item, "call_id", where)
        return {
            "id": _id(item, "fco"),
            "type": kind,
            "call_id": name,
            "output": "\n".join(texts),
            "status": "completed",
        }
    role = item.get("role")
    if role not in ROLES:
        raise wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}", role)
    return _message(role, _read_texts(item.get("content"), f"{where}.content"), item.get("id"))


def _read_texts(content: object, where: str, kinds: Sequence[str] = PARTS) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise wrong(where, "must be a string or a list of text parts", content)
    texts = []
    for number, part in enumerate(content):
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
        if kind not in kinds or not isinstance(text, str):
            allowed = " and ".join(repr(each) for each in kinds[:2])
            raise RequestError(
                f"{where}[{number}] is {shown_kind(part)}; only parts of type {allowed} are supported",
                param=f"{where}[{number}]",
            )
        texts.append(text)
    return texts


def _read_call(item: Mapping[str, Any], where: str) -> Item:
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        raise wrong(f"{where}.arguments", "must be JSON in a string", arguments)
    name, call = _named(item, "name", where), _named(item, "call_id", where)
    return function_call(_id(item, "fc"), call, name, arguments, "completed")


def _named(item: Mapping[str, Any], field: str, where: str) -> str:
    found = item.get(field)
    if not isinstance(found, str) or not found:
        raise wrong(f"{where}.{field}", "must be a non-empty string", found)
    return found


def _id(item: Mapping[str, Any], kind: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and given else new_id(kind)


def _message(role: str, texts: Sequence[str], given: object = None) -> Item:
    name = given if isinstance(given, str) and given else new_id("msg")
    if role == "assistant":
        return output_message(name, "completed", texts)
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"id": name, "type": "message", "role": role, "status": "completed", "content": parts}


def output_text(text: str) -> dict[str, Any]:
    """Make a content part of an output item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def output_message(name: str, status: str, texts: Iterable[str]) -> Item:
    """Make an output item."""
    content = [output_text(text) for text in texts]
    return {"id": name, "type": "message", "role": "assistant", "status": status, "content": content}


def reasoning_text(text: str) -> dict[str, Any]:
    """Make a content part of a reasoning item."""
    return {"type": "reasoning_text", "text": text}


def reasoning_item(name: str, status: str, texts: Iterable[str]) -> Item:
    """Make an item for what the model wrote for itself."""
    return {
        "id": name,
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [reasoning_text(text) for text in texts],
    }


def function_call(name: str, call: str, function: str, arguments: str, status: str) -> Item:
    """Make an item for a call. `name`: the item's own id, `call`: the id that the result names."""
    return {
        "id": name,
        "type": "function_call",
        "call_id": call,
        "name": function,
        "arguments": arguments,
        "status": status,
    }


def with_reply_ids(items: Sequence[Item], reply: Reply | None) -> list[Item]:
    """Add the generated ids to the output items that are stored, for the next turn: to the first that is no reasoning."""
    first = next((number for number, item in enumerate(items) if item["type"] != "reasoning"), None)
    if reply is None or first is None:
        return list(items)
    return [*items[:first], {**items[first], _REPLY: reply.as_json()}, *items[first + 1 :]]


def public(item: Item) -> Item:
    """Remove the generated ids from a stored item."""
    return {key: value for key, value in item.items() if key != _REPLY}


def as_messages(
    instructions: str | None, items: Sequence[Item], given: int = 0
) -> tuple[list[dict[str, Any]], dict[int, Reply]]:
    """Turn items into the messages of a chat: calls join the assistant's message before them, and what follows reasoning
    joins that. Also returns the replies whose generated ids are known, by number of their message.

    `given`: the number of the first item that the request brought. Raises: RequestError, for results without a call.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    replies = {}
    waiting: set[str] = set()  # ids of calls without a result
    for number, item in enumerate(items):
        place = f"input[{number - given}]"
        kind = item.get("type", "message")
        last = messages[-1] if messages else None
        joins = kind == "function_call" and last is not None and last["role"] == "assistant"
        if kind == "message" and item["role"] == "assistant" and last is not None:
            joins = last.keys() == {"role", "content", "reasoning_content"} and not last["content"]
        text = "" if kind != "message" else "\n".join(part["text"] for part in item["content"])
        if _REPLY in item:
            replies[len(messages) - joins] = Reply.from_json(text, item[_REPLY])
        if kind == "function_call":
            if item["call_id"] in waiting:
                raise RequestError(
                    f"{place}.call_id: {item['call_id'][:80]!r} is the id of two calls", param=f"{place}.call_id"
                )
            waiting.add(item["call_id"])
            if not joins:
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            assert last is not None
            said = {"name": item["name"], "arguments": item["arguments"]}
            last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": said})
        elif kind == "function_call_output":
            if item["call_id"] not in waiting:
                raise RequestError(
                    f"{place}.call_id: no call {item['call_id'][:80]!r} before it waits for a result",
                    param=f"{place}.call_id",
                )
            waiting.remove(item["call_id"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "reasoning":
            thought = "\n".join(part["text"] for part in item["content"])
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
        elif joins:
            assert last is not None
            last["content"] = text
        else:
            messages.append({"role": item["role"], "content": text})
    return messages, replies


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
