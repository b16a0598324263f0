"""Where marked blocks of a conversation end in the text of its prompt, and in its rows.

A client marks blocks to say that the prompt up to there is worth keeping (`cache_control`). Templates are programs, so a block's end
is looked for in what the template writes: marks are put into copies of the messages, and what is written must be the prompt's text
but for them.
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

Values = Sequence[Mapping[str, Any]]
Write = Callable[[bool, Values, Values], str]  # (with the generation prompt, messages, tools)


@dataclass(frozen=True, slots=True)
class BlockMark:
    """A marked block. `tool`: the number of a tool; otherwise the block ends in the message of a number, after `chars` characters
    of its content, or with the whole message where that is None (calls come after the content)."""

    message: int = 0
    chars: int | None = None
    tool: int | None = None


def find_marks(write: Write, messages: Values, tools: Values, text: str, marks: Sequence[BlockMark]) -> list[int]:
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
    write: Write, messages: Values, tools: Values, text: str, marks: Sequence[BlockMark], nonce: str
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


def _try(write: Write, messages: Values, tools: Values, prompt: bool) -> str:
    try:
        return write(prompt, messages, tools)
    except RequestError:
        return "\ue000"  # which is no text's beginning


def _common(a: str, b: str) -> int:
    """Count the characters that two texts begin with."""
    return bisect.bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda count: a[:count] != b[:count])
