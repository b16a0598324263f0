"""Damage to files, byte by byte."""

from __future__ import annotations

from pathlib import Path


def flip_text(path: Path, text: bytes, place: int) -> None:
    """Change the last byte of one occurrence of `text` in a file: the first one for place 0."""
    data, at = path.read_bytes(), -1
    for _ in range(place + 1):
        at = data.index(text, at + 1)
    end = at + len(text) - 1
    path.write_bytes(data[:end] + bytes([data[end] ^ 1]) + data[end + 1 :])
