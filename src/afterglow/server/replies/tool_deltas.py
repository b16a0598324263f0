"""Replies with calls and reasoning as chat completions write them: whole, and as deltas of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from afterglow.text.tool_calls.parts import CallDelta, Content, Part, Reasoning, ToolCall


def call_fields(call: ToolCall, arguments: str) -> dict[str, Any]:
    """Write a call."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def message_fields(content: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Write the message of a reply: `content` is null where there are calls, or reasoning, alone."""
    return {
        "role": "assistant",
        "content": content if content or not (calls or reasoning) else None,
        "refusal": None,
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": [call_fields(call, call.arguments) for call in calls]} if calls else {}),
    }


def delta_fields(parts: Iterable[Part]) -> dict[str, Any]:
    """Write the new parts of a reply."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallDelta):
            known = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            if part.first:
                calls[part.index] = {"index": part.index, **call_fields(part.call, part.arguments)}
            else:
                known["function"]["arguments"] += part.arguments
        else:
            name = "content" if isinstance(part, Content) else "reasoning_content"
            assert isinstance(part, Content | Reasoning)
            delta[name] = delta.get(name, "") + part.text
    return {**delta, "tool_calls": list(calls.values())} if calls else delta
