"""Rows of a context as ranges [start, stop): those left out, and those that remain. Arithmetic, no policy."""

from __future__ import annotations

from collections.abc import Sequence

from afterglow.errors import RequestError

Rows = tuple[int, int]  # [start, stop)


def count(ranges: Sequence[Rows]) -> int:
    """Count the rows in ranges that do not overlap."""
    return sum(stop - start for start, stop in ranges)


def complement(ranges: Sequence[Rows], rows: int) -> tuple[Rows, ...]:
    """Return the parts of [0, rows) that are in none of the ranges (sorted, apart)."""
    found, at = [], 0
    for start, stop in (*ranges, (rows, rows)):
        if at < min(start, rows):
            found.append((at, min(start, rows)))
        at = max(at, stop)
    return tuple(found)


def union(ranges: Sequence[Rows]) -> tuple[Rows, ...]:
    """Return the same rows as sorted ranges that do not touch."""
    found: list[Rows] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def keep(tokens: bytes, dropped: Sequence[Rows]) -> bytes:
    """Return tokens (uint32) without the dropped ranges (sorted, apart)."""
    return b"".join(tokens[4 * a : 4 * b] for a, b in complement(dropped, len(tokens) // 4))


def ranges_of(indices: Sequence[int], rows: int) -> tuple[Rows, ...]:
    """Turn a token discarding list into ranges.

    Raises:
        RequestError: the tokens are not sorted, not unique or outside of the context.
    """
    if any(b <= a for a, b in zip(indices, indices[1:], strict=False)):
        raise RequestError("the tokens to discard must be given in ascending order, each once", param="discard")
    if indices and not 0 <= indices[0] <= indices[-1] < rows:
        bad = indices[0] if indices[0] < 0 else indices[-1]
        raise RequestError(f"token {bad} cannot be discarded: the context has {rows} tokens", param="discard")
    if len(indices) >= rows:
        raise RequestError("not every token can be discarded", param="discard")
    return union([(i, i + 1) for i in indices])


def checked(ranges: Sequence[Rows], rows: int, first: int = 0) -> tuple[Rows, ...]:
    """Check a token discarding list of ranges; returns them sorted and apart.

    Rows before `first` (the system prompt) are not to be touched.

    Raises:
        RequestError: the list is empty, has an empty range, reaches outside of the context's `rows` or into the first
            ones, or leaves nothing.
    """
    if not ranges:
        raise RequestError("there is nothing to discard: the list is empty", param="discard")
    for start, stop in ranges:
        if not 0 <= start < stop <= rows:
            raise RequestError(
                f"tokens [{start}, {stop}) cannot be discarded: the context has {rows} tokens", param="discard"
            )
        if start < first:
            raise RequestError(
                f"tokens [{start}, {stop}) cannot be discarded: the first {first} are the system prompt",
                param="discard",
            )
    found = union(ranges)
    if count(found) >= rows:
        raise RequestError("not every token can be discarded", param="discard")
    return found
