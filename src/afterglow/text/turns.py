"""The places where turns of a conversation begin in its rendered text, so that old turns can be left out.

A turn begins with a user's message and ends where the next one begins. The text before the first turn (a system prompt,
a beginning-of-text token) is the head, which stays. Templates are programs, so nothing is taken for granted: leaving
out turns must give the very text that the template writes for the conversation without them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afterglow.errors import RequestError

Messages = Sequence[Mapping[str, Any]]
Write = Callable[[Messages, bool], str]  # (messages, with the generation prompt)

ONE_TURN = "there is no earlier turn that could be left out"
TEMPLATE = "this model's chat template does not write turns one after the other, so none can be left out whole"
TOKENS = "this model's tokens do not end where turns do"


@dataclass(frozen=True, slots=True)
class Turns:
    """`head`: characters before the first turn. `starts`: the characters at which turns begin, the first at `head`;
    empty if the text cannot be cut between turns, and `why_not` says why."""

    head: int
    starts: tuple[int, ...] = ()
    why_not: str | None = None


def find_turns(write: Write, messages: Messages, text: str, bos: str = "") -> Turns:
    """Find the turns of `messages`, whose text with the generation prompt is `text`. Renders four times, for any number
    of turns."""
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if len(users) > 1:
        for outside in (False, True):
            starts = _starts(write, messages, users, text, outside)
            if starts:
                return Turns(starts[0], tuple(starts))
    head = _head(write, messages, users[0] if users else 0, text, bos)
    return Turns(head, why_not=TEMPLATE if len(users) > 1 else ONE_TURN)


def _starts(write: Write, messages: Messages, users: Sequence[int], text: str, outside: bool) -> list[int]:
    """Find where each user's message begins; empty if that cannot be told. `outside`: the template drops white space
    around contents, and a mark next to the space must not keep it."""
    first, last = users[0], users[-1]
    mark = f"\ue000{secrets.token_hex(8)}"
    begin, end = mark + "b\ue001", mark + "e\ue001"

    def marked(number: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message["content"]
        core = content.strip() if outside else content
        left, _, right = content.partition(core) if core else ("", "", content)
        before = begin if number in users else ""
        after = end if number == last - 1 else ""
        return {**message, "content": f"{left}{before}{core}{after}{right}"}

    try:
        pieces = write([marked(n, m) for n, m in enumerate(messages)], True).split(begin)
        if len(pieces) != len(users) + 1 or "".join(pieces).replace(end, "") != text:
            return []
        # `between` is the text from the last message before the last turn to that turn: the end of the message, which
        # also closes the conversation without the turn, and the beginning of the turn.
        before = write([marked(n, m) for n, m in enumerate(messages[:last])], False)
        closing, between = before.rpartition(end)[2], pieces[-2].rpartition(end)[2]
        without = write([*messages[:first], *messages[last:]], True)
    except RequestError:
        return []
    if not between.startswith(closing):
        return []
    heading = between[len(closing) :]
    starts, at = [], 0
    for piece in pieces[:-1]:
        at += len(piece.replace(end, ""))
        starts.append(at - len(heading))
        if not text.startswith(heading, starts[-1]) or starts[-1] < (starts[-2] if len(starts) > 1 else 0):
            return []
    return starts if text[: starts[0]] + text[starts[-1] :] == without else []


def _head(write: Write, messages: Messages, count: int, text: str, bos: str) -> int:
    """Find the end of the first `count` messages in the text, approximately where the template does not tell."""
    contents = [message["content"].strip() for message in messages[:count]]
    try:
        prefix = write(messages[:count], False)
        if text.startswith(prefix) and all(content in prefix for content in contents):
            return len(prefix)
    except RequestError:
        pass
    at = len(bos) if text.startswith(bos) else 0
    for content in contents:
        found = text.find(content, at)
        at = found + len(content) if found >= 0 else at
    return at
