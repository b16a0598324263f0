"""Where in the text of a prompt the replies end that its client got in parts: the template writes them in its own way."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from afterglow.errors import RequestError
from afterglow.text.reply_memory import Reply

Messages = Sequence[Mapping[str, Any]]


def place_replies(
    known: Mapping[int, Reply],
    write: Callable[[Messages], str],
    messages: Messages,
    text: str,
    ends_of: Callable[[Reply], Sequence[str]],
    marker_at: Callable[[int], int | None],
    begun: int | None = None,
) -> list[tuple[Reply, int | None]]:
    """Pair the known replies (by number of their message) with the character of `text` at which they end, or None where the
    reply's own text says that. Replies whose end is not found are left out.

    `ends_of`: the markers that may end a reply, the likeliest first. `marker_at` a character: the marker that begins there. `begun`: the
    number of a reply that goes on; the text ends with it.
    """
    parted = [number for number, reply in known.items() if reply.parts is not None and number != begun]
    borders = dict(zip(parted, _borders(write, messages, text, parted), strict=False)) if parted else {}
    placed: list[tuple[Reply, int | None]] = []
    for number, reply in known.items():
        if reply.parts is None:
            placed.append((reply, None))
        elif number in borders or number == begun:
            stop: int | None = len(text)
            if number != begun:
                span = (reply.prompt_chars, borders[number])
                found = (_last_marker(text, span, end, marker_at) for end in ends_of(reply))
                stop = next((place for place in found if place is not None), None)
            # A template may leave old reasoning out: then the generated ids say more than the template does.
            thought = "" if reply.begun else messages[number].get("reasoning_content", "")
            if stop is not None and text.find(thought, reply.prompt_chars, stop) >= 0:
                placed.append((reply, stop))
    return placed


def _borders(write: Callable[[Messages], str], messages: Messages, text: str, wanted: Sequence[int]) -> list[int]:
    """Find for each of the `wanted` messages (ascending) a character of `text` behind it, and before the content of the
    message that follows. Empty if the template does not show that. Renders once."""
    nonce = f"\ue000{secrets.token_hex(8)}\ue001"
    marked = list(messages)
    for number in wanted:
        if number + 1 >= len(messages):
            return []
        content = messages[number + 1]["content"]
        space = len(content) - len(content.lstrip())
        marked[number + 1] = {**marked[number + 1], "content": content[:space] + nonce + content[space:]}
    try:
        pieces = write(marked).split(nonce)
    except RequestError:
        return []
    if len(pieces) != len(wanted) + 1 or "".join(pieces) != text:
        return []
    found, at = [], 0
    for piece in pieces[:-1]:
        at += len(piece)
        found.append(at)
    return found


def _last_marker(text: str, span: tuple[int, int], marker: str, marker_at: Callable[[int], int | None]) -> int | None:
    """Find the last place in a span at which a marker begins that is no plain text."""
    place = text.rfind(marker, *span)
    while place >= 0 and marker_at(place) is None:
        place = text.rfind(marker, span[0], place)
    return place if place >= 0 else None
