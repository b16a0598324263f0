"""Perplexity of plain text that runs through several overflows, teacher-forced in pieces (CachedAttention, table 1)."""

from __future__ import annotations

from collections.abc import Sequence

from afterglow.model.decoder import Decoder
from benchmarks.common.paired import Paired
from benchmarks.common.texts import Encode
from benchmarks.papers.cachedattention.overflow.context import Prefill, Session

PIECES = 16  # of a window: what a turn is in a conversation


def stream_length(window: int, overflows: int) -> int:
    """Tokens of a stream that overflows so many times, with half a window of text after each overflow."""
    return window + overflows * (window // 2) + window // PIECES


def spaced(text: str, encode: Encode, streams: int, tokens: int) -> list[list[int]]:
    """`streams` evenly spaced parts of a text, of `tokens` each, from a line's beginning on; fewer where it is short.

    Only these parts are encoded, so the text may be long.
    """
    found = []
    for stream in range(streams):
        start = stream * len(text) // streams
        start = text.find("\n", start) + 1 if stream else 0
        end = (stream + 1) * len(text) // streams
        ids = encode(text[start : min(end, start + 10 * tokens)])
        if len(ids) >= tokens:
            found.append(ids[:tokens])
    if not found:
        raise ValueError(f"the text is too short: no part has {tokens} tokens")
    return found


def perplexity(
    decoder: Decoder, streams: Sequence[Sequence[int]], head: Sequence[int], *, window: int
) -> tuple[Paired, Prefill]:
    """Losses after the first overflow of each stream, in all variants."""
    piece = window // PIECES
    losses, prefill = Paired(), Prefill()
    for number, ids in enumerate(streams):
        session = Session(decoder, head, window)
        for at in range(0, len(ids) - piece + 1, piece):
            losses.add(session.add(ids[at : at + piece]), number)
        prefill.add(session.prefill)
    return losses, prefill
