"""Messages as clients send them, with calls and their results: checked, and made plain for templates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from afterglow.errors import RequestError
from afterglow.request import ToolCall
from afterglow.text.chat_template import shown, shown_kind

MAX_CALLS = 1024  # in one message
MAX_NESTING = 64  # arrays and objects within each other: templates and others go into them by recursion
_WHOLE = 2.0**53  # below which a float is exact


def read_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Check a message's `tool_calls` and copy them with arguments as objects, as templates want them. Arguments that a
    model wrote, and that are no JSON object, remain text.

    Raises: RequestError, with the place of the mistake.
    """
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _wrong(where, "must be a list of calls", calls)
    if len(calls) > MAX_CALLS:
        raise RequestError(f"{where}: at most {MAX_CALLS} calls are read in a message, got {len(calls)}", param=where)
    found, ids = [], set()
    for number, call in enumerate(calls):
        place = f"{where}[{number}]"
        if not isinstance(call, Mapping):
            raise _wrong(place, "must be an object", call)
        if call.get("type", "function") != "function":
            raise _wrong(f"{place}.type", "must be 'function'", call["type"])
        name, function = call.get("id"), call.get("function")
        if not isinstance(name, str) or not name:
            raise _wrong(f"{place}.id", "must be a non-empty string", name)
        if name in ids:
            raise RequestError(f"{place}.id: {name[:80]!r} is the id of two calls of this message", param=f"{place}.id")
        ids.add(name)
        if not isinstance(function, Mapping):
            raise _wrong(f"{place}.function", "must be an object with name and arguments", function)
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise _wrong(f"{place}.function.name", "must be a non-empty string", function.get("name"))
        arguments = function.get("arguments", "{}")
        if not isinstance(arguments, str | Mapping):
            raise _wrong(f"{place}.function.arguments", "must be JSON in a string", arguments)
        said = {"name": function["name"], "arguments": _object(arguments)}
        found.append({"id": name, "type": "function", "function": said})
    return found


def check_results(messages: Sequence[dict[str, Any]], name: str) -> None:
    """Check that each result answers a call before it, and that no call has two results; gives results the name of
    their tool, which some templates write.

    Raises: RequestError.
    """
    open_calls: dict[str, str] = {}  # id to name
    answered: set[str] = set()
    for number, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            open_calls[call["id"]] = call["function"]["name"]
            answered.discard(call["id"])
        if message["role"] != "tool":
            continue
        where = f"{name}[{number}].tool_call_id"
        given = message.get("tool_call_id")
        if not isinstance(given, str) or not given:
            raise _wrong(where, "must be the id of the call that this is the result of", given)
        if given not in open_calls:
            raise RequestError(f"{where}: no message before it has a call with the id {given[:80]!r}", param=where)
        if given in answered:
            raise RequestError(f"{where}: the call {given[:80]!r} has a result already", param=where)
        answered.add(given)
        if not isinstance(message.get("name"), str):
            message["name"] = open_calls[given]


def names_of_calls(message: Mapping[str, Any]) -> str:
    """Write the calls of a message as a text that is equal for equal calls: names and arguments, no ids. Clients in JavaScript
    write 2.0 as 2."""
    said = [[call["function"]["name"], _plain(call["function"]["arguments"])] for call in message.get("tool_calls", ())]
    return json.dumps(said) if said else ""


def message_of(content: str, calls: Sequence[ToolCall], reasoning: str = "") -> dict[str, Any]:
    """Make the message of a reply, as it is read where it comes back."""
    said = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _object(call.arguments)}}
        for call in calls
    ]
    return {
        "role": "assistant",
        "content": content,
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": said} if said else {}),
    }


def _plain(value: Any) -> Any:
    """Copy a JSON value with whole numbers as integers."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE:
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _object(arguments: str | Mapping[str, Any]) -> Any:
    if isinstance(arguments, Mapping):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = read_json(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def read_json(text: str) -> Any:
    """Read a JSON text from elsewhere. Raises: ValueError, also where it is nested deeper than a request may be."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_DEEP) from None
    level = [value]
    for _ in range(MAX_NESTING):
        held = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = list(chain.from_iterable(held))
    if any(isinstance(each, dict | list) for each in level):
        raise ValueError(_DEEP)
    return value


_DEEP = f"it is nested too deeply: more than {MAX_NESTING} arrays and objects within each other"


def _wrong(where: str, wanted: str, got: object) -> RequestError:
    return RequestError(f"{where} {wanted}, got {shown(got)}", param=where)


def texts_in(value: object) -> Iterator[str]:
    """Yield all parts of what a client sent, before it is checked: texts, and names of members, numbers and brackets as texts.
    None of them is empty: together they are as long as the work on them."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each or '""'
        elif isinstance(each, dict):
            yield "{}"
            waiting += [*each, *each.values()]
        elif isinstance(each, list):
            yield "[]"
            waiting += each
        else:
            yield str(each)


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


def check_begun(messages: object, where: str | None = None) -> None:
    """Refuse a last message that no reply can go on from; other mistakes are not looked for. `where`: its path. Raises: RequestError."""
    if not isinstance(messages, Sequence) or not messages or not isinstance(last := messages[-1], Mapping):
        return
    where = where or f"messages[{len(messages) - 1}]"
    if last.get("role") != "assistant":
        raise RequestError(
            f"{where}: only an assistant's message can be continued, and the last one has the role {shown(last.get('role'))}; leave "
            "continue_final_message (or prefix) out, or add the beginning of the reply",
            param=where,
        )
    if last.get("tool_calls"):
        raise RequestError(f"{where}: a message with calls cannot be continued; their results come next", param=where)
    if not last.get("content"):
        raise RequestError(f"{where} has no content that a reply could continue", param=where)


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
