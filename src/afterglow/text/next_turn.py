"""The tokens with which the next turn of a conversation will begin, as far as they are known when a reply has ended.

They are not always those of the prompt and the reply: templates leave old reasoning out, and marks that a generation prompt opens
are not written behind it. So a part of what was computed is of no use to the next turn.

The tokens that all conversations with the same system prompt begin with are found here too. The prompt's text alone does not tell:
byte pairs may join its end to what follows. So whole conversations are tokenised, as requests are, and compared; what
they have in common is cut back to where a marker of the template begins or ends, which is where tokenizers cut first. A template
that writes no marker behind the system prompt has no such place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from afterglow.errors import RequestError
from afterglow.request import ToolCall
from afterglow.text.messages import message_of
from afterglow.text.reply_memory import ChatPrompt
from afterglow.text.tokenizer import Tokenizer

PROBES = ("a", " b", "\n\nC", "7", "ß", "。", ".")  # beginnings of messages that byte pairs treat differently
LONGER = ("s", " and", "\n", ".", "ß")  # ends that another system prompt might have

NO_MARKER = (
    "this model's chat template writes no special token between the system prompt and the first message, so there are no "
    "tokens that all requests begin with; put the prompt into the requests instead"
)
ONE_ONLY = "this model's chat template writes only one system message, so none can follow the registered one"


def system_prefix(tokenizer: Tokenizer, text: str, *, others_follow: bool = False) -> list[int]:
    """Find the token ids with which every conversation with this system prompt begins: up to the last special token
    before the first turn, or up to the special token that begins the turn.

    `others_follow`: another system message may come next. Raises: RequestError, if the template has no place for the
    prompt.
    """

    def encode(*messages: tuple[str, str]) -> tuple[list[int], str, tuple[int, ...]]:
        said = [{"role": role, "content": content} for role, content in messages]
        prompt = tokenizer.encode_chat(said, cut_over=0)
        return prompt.ids, prompt.text, prompt.turns

    system = ("system", text)
    found = [encode(system, ("user", probe)) for probe in PROBES]
    found.append(encode(system, ("user", PROBES[0]), ("assistant", PROBES[1]), ("user", PROBES[2])))
    head = min(turns[0] for _, _, turns in found)  # the first turn may be left out one day, with its markers
    if others_follow:
        second = "Say nothing but numbers"
        more = encode(system, ("system", second), ("user", PROBES[0]))
        if second not in more[1]:
            raise RequestError(ONE_ONLY, param="text")
        found.append(more)
    ids = [each[0] for each in found]
    markers = tokenizer.markers.ids
    shorter = min(map(len, ids)) - 1  # than any: the token behind is looked at
    for row in range(min(head, _common(ids), shorter), 0, -1):
        ends = ids[0][row - 1] in markers
        if (ends or ids[0][row] in markers) and _covers(tokenizer, text, ids[0][:row]):
            return ids[0][:row]
    raise RequestError(NO_MARKER, param="text")


def _common(ids: Sequence[Sequence[int]]) -> int:
    """Count the tokens that all sequences begin with."""
    return sum(1 for _ in takewhile(lambda row: len(set(row)) == 1, zip(*ids, strict=False)))


def _covers(tokenizer: Tokenizer, text: str, prefix: list[int]) -> bool:
    """Check that the prefix covers the whole prompt: no longer prompt begins with the same tokens."""
    return not any(
        _begin_alike(tokenizer, text + more, prefix) for more in LONGER if (text + more).strip() != text.strip()
    )


def _begin_alike(tokenizer: Tokenizer, text: str, prefix: list[int]) -> bool:
    said: list[Mapping[str, Any]] = [{"role": "system", "content": text}, {"role": "user", "content": PROBES[0]}]
    return tokenizer.encode_chat(said).ids[: len(prefix)] == prefix


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
    before = list(prompt.asked.messages)
    if prompt.asked.continues:
        begun = before.pop()
        content, reasoning = begun["content"] + content, begun.get("reasoning_content", "") + reasoning
    for message in _messages(prompt, content, calls, reasoning):
        try:
            ids = tokenizer.encode_up_to(PLACE, [*before, message, *_following(calls)], prompt)
        except RequestError:  # a template with an order of roles that is not known here
            continue
        # The last token that was generated has no row yet.
        if _common([ids, computed]) < min(len(ids), len(computed) - 1) and ids not in found:
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
