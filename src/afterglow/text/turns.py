"""The places in the rendered text of a conversation where turns begin, so that old turns can be left out, and where marked blocks end.

A turn begins with a user's message and ends where the next one begins. The text before the first turn (a system prompt,
a beginning-of-text token) is the head, which stays. Templates are programs, so nothing is taken for granted: leaving
out turns must give the very text that the template writes for the conversation without them.

A client marks blocks to say that the prompt up to there is worth keeping (`cache_control`). A block's end is looked for in what the
template writes: marks are put into copies of the messages, and what is written must be the prompt's text but for them.
"""

from __future__ import annotations

import bisect
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afterglow.errors import RequestError
from afterglow.text.reply_memory import Segment

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


Values = Sequence[Mapping[str, Any]]
WriteParts = Callable[[bool, Values, Values], str]  # (with the generation prompt, messages, tools)


@dataclass(frozen=True, slots=True)
class BlockMark:
    """A marked block. `tool`: the number of a tool; otherwise the block ends in the message of a number, after `chars` characters
    of its content, or with the whole message where that is None (calls come after the content)."""

    message: int = 0
    chars: int | None = None
    tool: int | None = None


def find_marks(write: WriteParts, messages: Values, tools: Values, text: str, marks: Sequence[BlockMark]) -> list[int]:
    """Find the character of the prompt's `text` at which each marked block ends.

    Where the template hides that, the block ends where the message before it does; 0 if that is hidden too. Many templates write
    tools behind the system message: they belong to what a mark in that message keeps.
    """
    nonce = f"\ue000{secrets.token_hex(8)}"
    shown = _shown(write, messages, tools, text, marks, nonce)

    def end_of_tools(count: int) -> int:
        probe = {"name": nonce, "description": "", "parameters": {"type": "object", "properties": {}}}
        written = _try(write, messages, [*tools[:count], {"type": "function", "function": probe}], True)
        return _common(text, written) if nonce in written else 0

    def end_of_messages(count: int) -> int:
        written = _try(write, messages[:count], tools, False)
        return len(written) if text.startswith(written) else 0

    first = _first_turn(messages)
    found = []
    for mark in marks:
        if mark.tool is not None:
            found.append(end_of_tools(mark.tool + 1))
            continue
        end = shown.get(mark, 0)
        if not end and mark.chars is None:
            end = end_of_messages(mark.message + 1)
        end = end or (end_of_messages(mark.message) if mark.message else 0)
        if tools and mark.message < first:
            behind = end_of_tools(len(tools))
            end = behind if end < behind <= shown.get(BlockMark(first, 0), 0) else end
        found.append(end)
    return found


def rows_before(segments: Sequence[Segment], char: int, ended: Callable[[Segment, int], int]) -> int:
    """Count the tokens that end at a character of the text, or before. `ended` counts them within a segment; the tokens of a
    reply are not known apart, and count as a whole."""
    rows = 0
    for segment in segments:
        if segment.stop <= char:
            rows += len(segment.ids)
            continue
        if segment.start < char and not segment.whole:
            rows += ended(segment, char)
        break
    return rows


def _shown(
    write: WriteParts, messages: Values, tools: Values, text: str, marks: Sequence[BlockMark], nonce: str
) -> dict[BlockMark, int]:
    """Find the marked places within contents, and the beginning of the first turn. Renders once."""
    wanted = {mark for mark in marks if mark.tool is None and mark.chars is not None}
    first = _first_turn(messages)
    if first < len(messages):
        wanted.add(BlockMark(first, 0))
    placed = sorted(wanted, key=lambda mark: (mark.message, mark.chars or 0), reverse=True)
    marked: list[Mapping[str, Any]] = list(messages)
    for number, mark in enumerate(placed):  # from the last to the first: the places before stay
        content = marked[mark.message]["content"]
        # Templates drop white space around contents, and a mark next to the space must not keep it.
        at = len(content[: mark.chars].rstrip()) if mark.chars else len(content) - len(content.lstrip())
        if mark.chars and not at:
            continue
        marked[mark.message] = {
            **marked[mark.message],
            "content": f"{content[:at]}{nonce}{number}\ue001{content[at:]}",
        }
    pieces = re.split(f"{nonce}(\\d+)\ue001", _try(write, marked, tools, True))
    if "".join(pieces[::2]) != text:
        return {}
    found: dict[BlockMark, int] = {}
    at = 0
    for number, piece in enumerate(pieces):
        if number % 2:
            found.setdefault(placed[int(piece)], at)
        else:
            at += len(piece)
    return found


def _first_turn(messages: Values) -> int:
    """Return the number of the first message that is no system message."""
    return next(
        (n for n, message in enumerate(messages) if message["role"] not in ("system", "developer")), len(messages)
    )


def _try(write: WriteParts, messages: Values, tools: Values, prompt: bool) -> str:
    try:
        return write(prompt, messages, tools)
    except RequestError:
        return "\ue000"  # which is no text's beginning


def _common(a: str, b: str) -> int:
    """Count the characters that two texts begin with."""
    return bisect.bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda count: a[:count] != b[:count])
