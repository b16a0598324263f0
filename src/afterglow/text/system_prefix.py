"""The tokens that all conversations with the same system prompt begin with, however they go on.

The prompt's text alone does not tell: byte pairs may join its end to what follows (spec R9). So whole conversations are
tokenised, as requests are, and compared; what they have in common is cut back to where a marker of the template begins
or ends, which is where tokenizers cut first. A template that writes no marker behind the system prompt has no such place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from afterglow.errors import RequestError
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
    for row in range(min(head, _common(ids)), 0, -1):
        ends = ids[0][row - 1] in markers
        if (ends or ids[0][row] in markers) and _covers(tokenizer, text, ids[0][:row]):
            return ids[0][:row]
    raise RequestError(NO_MARKER, param="text")


def _common(ids: Sequence[list[int]]) -> int:
    """Count the tokens that all sequences begin with, without the last token of the shortest."""
    rows = min(map(len, ids)) - 1
    first = ids[0]
    return sum(1 for _ in takewhile(lambda row: all(each[row] == first[row] for each in ids), range(rows)))


def _covers(tokenizer: Tokenizer, text: str, prefix: list[int]) -> bool:
    """Check that the prefix covers the whole prompt: no longer prompt begins with the same tokens."""
    return not any(
        _begin_alike(tokenizer, text + more, prefix) for more in LONGER if (text + more).strip() != text.strip()
    )


def _begin_alike(tokenizer: Tokenizer, text: str, prefix: list[int]) -> bool:
    said: list[Mapping[str, Any]] = [{"role": "system", "content": text}, {"role": "user", "content": PROBES[0]}]
    return tokenizer.encode_chat(said).ids[: len(prefix)] == prefix
