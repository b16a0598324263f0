"""The tokens with which the next turn of a conversation will begin, as far as they are known when a reply has ended.

They are not always those of the prompt and the reply: templates leave old reasoning out, and marks that a generation prompt opens
are not written behind it. So a part of what was computed is of no use to the next turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from afterglow.errors import RequestError
from afterglow.text.reply_memory import ChatPrompt
from afterglow.text.tokenizer import Tokenizer
from afterglow.text.tool_calls.parts import ToolCall
from afterglow.text.tool_messages import message_of

PLACE = "the place of the next message"


def next_prompts(
    tokenizer: Tokenizer,
    prompt: ChatPrompt,
    generated: Sequence[int],
    content: str,
    calls: Sequence[ToolCall] = (),
    reasoning: str = "",
) -> list[list[int]]:
    """List the beginnings of prompts that the next turn may have, and that part from the prompt and the reply (`generated`).

    Behind calls come their results, and otherwise a user's message. Some clients send the reasoning back, and some do not: a
    conversation that has some is of the first kind.
    """
    computed = [*prompt.ids, *generated]
    found: list[list[int]] = []
    for message in _messages(prompt, content, calls, reasoning):
        try:
            ids = tokenizer.encode_up_to(PLACE, [*prompt.asked.messages, message, *_following(calls)], prompt)
        except RequestError:  # a template with an order of roles that is not known here
            continue
        # The last token that was generated has no row yet.
        if _common(ids, computed) < min(len(ids), len(computed) - 1) and ids not in found:
            found.append(ids)
    return found


def _messages(
    prompt: ChatPrompt, content: str, calls: Sequence[ToolCall], reasoning: str
) -> Iterator[Mapping[str, Any]]:
    returned = any("reasoning_content" in message for message in prompt.asked.messages)
    if not returned:
        yield message_of(content, calls)
    if reasoning:
        yield message_of(content, calls, reasoning)


def _following(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    if not calls:
        return [{"role": "user", "content": PLACE}]
    places = (PLACE, *[""] * (len(calls) - 1))
    return [
        {"role": "tool", "tool_call_id": call.id, "content": place} for call, place in zip(calls, places, strict=True)
    ]


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((row for row, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
