"""Messages as clients send them: checked, and made plain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from afterglow.errors import RequestError
from afterglow.text.chat_template import shown, shown_kind
from afterglow.text.tool_messages import check_results, read_calls


def texts_in(messages: object) -> Iterator[str]:
    """Yield all text of messages as a client sent them, before they are checked."""
    for message in messages if isinstance(messages, list) else ():
        for value in message.values() if isinstance(message, dict) else ():
            for part in value if isinstance(value, list) else [value]:
                text = part.get("text") if isinstance(part, dict) else part
                if isinstance(text, str):
                    yield text
                elif isinstance(part, dict) and isinstance(call := part.get("function"), dict):
                    yield from (each for each in call.values() if isinstance(each, str))


def flatten_messages(messages: object, name: str = "messages") -> list[dict[str, Any]]:
    """Check chat messages and copy them with contents that are strings, calls whose arguments are objects, and reasoning as
    `reasoning_content`. `name` is the request's field.

    Raises: RequestError, which names the place of a content that is not text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"{name} must be a list with at least one message", param=name)
    flat = []
    for number, message in enumerate(messages):
        where = f"{name}[{number}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be an object with role and content", param=where)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RequestError(f"{where}.role must be a non-empty string, got {shown(role)}", param=f"{where}.role")
        for field in ("function_call", "audio"):
            if message.get(field):
                raise RequestError(f"{where}.{field} is not supported", param=f"{where}.{field}")
        content = _flatten_content(message.get("content"), f"{where}.content", role)
        copied = {**message, "role": role, "content": content}
        copied.pop("tool_calls", None)
        _read_reasoning(copied, where)
        if calls := message.get("tool_calls"):
            if role != "assistant":
                raise RequestError(f"{where}.tool_calls: only the assistant calls tools", param=f"{where}.tool_calls")
            copied["tool_calls"] = read_calls(calls, f"{where}.tool_calls")
        flat.append(copied)
    check_results(flat, name)
    return flat


def _read_reasoning(message: dict[str, Any], where: str) -> None:
    """Check the reasoning of a message, which clients send back under one of two names, and keep it under the first."""
    found = ""
    for field in ("reasoning", "reasoning_content"):
        given = message.pop(field, None)
        if not isinstance(given, str | None):
            raise RequestError(f"{where}.{field} must be a string, got {shown(given)}", param=f"{where}.{field}")
        found = given or found
    if found and message["role"] != "assistant":
        raise RequestError(f"{where}.reasoning_content: only the assistant thinks", param=f"{where}.reasoning_content")
    if found:
        message["reasoning_content"] = found


def _flatten_content(content: object, where: str, role: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} must be a string or a list of text parts, got {shown(content)}", param=where)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise RequestError(
                f"{where}[{number}] is {shown_kind(part)}; only parts of type 'text' are supported",
                param=f"{where}[{number}]",
            )
        texts.append(text)
    return "\n".join(texts)
