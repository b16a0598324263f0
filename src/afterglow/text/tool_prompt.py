"""Tools in the system prompt, for models whose chat template knows none.

The form is that of the Hermes models, on which many others were trained. Calls and results become plain messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

HEAD = (
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


def without_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], system: bool) -> list[Message]:
    """Write tools, calls and results into plain messages. `system`: the template knows system messages; otherwise the
    tools go before the first user's message."""
    plain: list[Message] = []
    answered = False  # the last message holds results, and further ones join it
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if answered:
                text = f"{plain.pop()['content']}\n{text}"
            plain.append({"role": "user", "content": text})
            answered = True
            continue
        answered = False
        if calls := message.get("tool_calls"):
            texts = [message["content"]] if message["content"] else []
            texts += [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in calls]
            message = {"role": message["role"], "content": "\n".join(texts)}
        plain.append(message)
    if not tools:
        return plain
    told = HEAD + "\n".join(map(_json, tools)) + TAIL
    first = next((n for n, message in enumerate(plain) if message["role"] in ("system", "developer")), None)
    if first is None and system:
        return [{"role": "system", "content": told}, *plain]
    if first is None:
        first = next((n for n, message in enumerate(plain) if message["role"] == "user"), None)
        if first is None:
            return [{"role": "user", "content": told}, *plain]
        told = f"{told}\n\n{plain[first]['content']}"
    else:
        told = f"{plain[first]['content']}\n\n{told}"
    plain[first] = {**plain[first], "content": told}
    return plain


def _json(value: Mapping[str, Any]) -> str:
    named = {key: value[key] for key in ("name", "arguments") if key in value} or dict(value)
    return json.dumps(named, ensure_ascii=False)
