"""Conversations that outgrow a window so many times, as turns of token ids: texts cut into pieces, and dialogues joined.

Part `n` of a data set is always the same, however many parts are measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common.texts import Encode
from benchmarks.papers.cachedattention.overflow.choices import RECORD_END, Question
from benchmarks.papers.cachedattention.overflow.perplexity import PIECES, spaced, stream_length

PARTS = 16  # that a data set is divided into
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"

Turns = list[list[int]]


def pieces(ids: Sequence[int], size: int) -> Turns:
    """Cut ids into turns of at most `size`."""
    return [list(ids[at : at + size]) for at in range(0, len(ids), size)]


def of_text(path: Path, encode: Encode, window: int, overflows: int) -> list[Turns]:
    """Return the parts of a plain text: evenly spaced, fewer where it is short."""
    length = stream_length(window, overflows)
    text = path.read_text(encoding="utf-8", errors="replace")
    return [pieces(ids, window // PIECES) for ids in spaced(text, encode, PARTS, length)]


def of_dialogues(path: Path, encode: Encode, window: int, overflows: int) -> list[Turns]:
    """Return the parts of MT-Bench-101's dialogues, one behind the other as one user's chat: a turn is a question with its answer,
    or a quarter of a window of it. The tasks are spread over all parts."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    length = stream_length(window, overflows)
    found = []
    for part in range(PARTS):
        turns: Turns = []
        rows_of_part = iter(rows[part::PARTS])
        while (total := sum(map(len, turns))) < length and (row := next(rows_of_part, None)) is not None:
            for ids in _exchanges(row, encode):
                turns += pieces(ids, window // 4)
        if total >= length:
            found.append(_shortened(turns, length))
    return found


def _exchanges(row: dict[str, list[dict[str, str]]], encode: Encode) -> Iterator[list[int]]:
    for each in row["history"]:
        yield encode(f"<|im_start|>user\n{each['user']}<|im_end|>\n<|im_start|>assistant\n{each['bot']}<|im_end|>\n")


def _shortened(turns: Turns, length: int) -> Turns:
    found: Turns = []
    for turn in turns:
        room = length - sum(map(len, found))
        if room < 2:
            break
        found.append(turn[:room])
    return found


def before_a_record(
    text: Sequence[int], question: Question, encode: Encode, head: int, window: int, overflows: int
) -> tuple[Turns, list[int]]:
    """Return turns of text and a shortened record that fill the window of a conversation with `head` rows to the last token, when it
    is about to overflow once more, with the turn that makes it overflow; and the record alone, its end included. Each part of the
    record keeps its beginning."""
    piece, end = window // PIECES, encode(RECORD_END)
    share = (window // 2 - len(end) - piece) // len(question.record)
    record = [token for part in question.record for token in encode(part)[:share]]
    before = window + (overflows - 1) * (window // 2) - head - len(record)
    return [*pieces(text[:before], piece), *pieces(record, piece), end], [*record, *end]


def begun(turns: Turns, head: int, window: int) -> tuple[list[int], Turns]:
    """Divide turns: the ids that need no turns of their own, because the window has room for them and one more; and the others."""
    first: list[int] = []
    for at, (turn, after) in enumerate(zip(turns, turns[1:], strict=False)):
        if head + len(first) + len(turn) + len(after) > window:
            return first, turns[at:]
        first += turn
    return first, turns[-1:]
