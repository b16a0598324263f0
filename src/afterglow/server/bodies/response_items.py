"""Items of `/v1/responses`: read from clients, stored, and turned into the messages of a chat."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from afterglow.errors import RequestError
from afterglow.text import Reply
from afterglow.text.chat_template import shown, shown_kind

Item = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
PARTS = ("input_text", "output_text", "text")
_REPLY = "_reply"  # in a stored item: the ids of a reply, hidden from clients


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def read_input(value: object) -> list[Item]:
    """Read the field `input` as message items with ids. Raises: RequestError, with the place of an item that is no text
    message."""
    if isinstance(value, str):
        return [_message("user", [value])]
    if not isinstance(value, list) or not value:
        raise RequestError("input must be a string or a list with at least one item", param="input")
    return [_read_item(item, f"input[{number}]") for number, item in enumerate(value)]


def _read_item(item: object, where: str) -> Item:
    if not isinstance(item, Mapping) or item.get("type", "message") != "message":
        raise RequestError(f"{where} is {shown_kind(item)}; only items of type 'message' are supported", param=where)
    role, content, given = item.get("role"), item.get("content"), item.get("id")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", param=f"{where}.role")
    if isinstance(content, str):
        return _message(role, [content], given)
    if not isinstance(content, list):
        raise RequestError(
            f"{where}.content must be a string or a list of text parts, got {shown(content)}",
            param=f"{where}.content",
        )
    texts = []
    for number, part in enumerate(content):
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
        if kind not in PARTS or not isinstance(text, str):
            raise RequestError(
                f"{where}.content[{number}] is {shown_kind(part)}; only parts of type 'input_text' and 'output_text' "
                "are supported",
                param=f"{where}.content[{number}]",
            )
        texts.append(text)
    return _message(role, texts, given)


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


def with_reply_ids(item: Item, reply: Reply | None) -> Item:
    """Add the generated ids to an output item that is stored, for the next turn."""
    return item if reply is None else {**item, _REPLY: reply.as_json()}


def public(item: Item) -> Item:
    """Remove the generated ids from a stored item."""
    return {key: value for key, value in item.items() if key != _REPLY}


def as_messages(instructions: str | None, items: Sequence[Item]) -> tuple[list[dict[str, str]], dict[int, Reply]]:
    """Turn items into the messages of a chat. Also returns the replies whose generated ids are known, by number of
    their message."""
    messages = [{"role": "system", "content": instructions}] if instructions else []
    replies = {}
    for item in items:
        text = "\n".join(part["text"] for part in item["content"])
        if _REPLY in item:
            replies[len(messages)] = Reply.from_json(text, item[_REPLY])
        messages.append({"role": item["role"], "content": text})
    return messages, replies
