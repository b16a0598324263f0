"""Replies that say the same again and again, which small models do until they are stopped."""

from __future__ import annotations

LONGEST_PASSAGE = 300  # characters
TIMES = 4
LEAST = 200  # characters: a line of dashes, or a table's rule, is not that long


def repeated(text: str) -> int:
    """Count the characters at the end of a text that only repeat what is before them; 0 if the text goes on.

    The end must be one passage, at least `TIMES` times in a row.
    """
    for length in range(1, min(LONGEST_PASSAGE, len(text) // TIMES) + 1):
        if text[-1 - length] != text[-1]:
            continue
        end = max(LEAST, TIMES * length)
        if len(text) >= end and text[-end:-length] == text[-end + length :]:
            start = len(text) - end
            while start > 0 and text[start - 1] == text[start - 1 + length]:
                start -= 1
            return len(text) - length - start
    return 0
