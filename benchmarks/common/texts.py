"""Plain texts as token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

Encode = Callable[[str], list[int]]
"""Text to ids, without any marker at its beginning."""


def stories(path: Path, encode: Encode, bos: int, streams: int, tokens: int) -> list[list[int]]:
    """`streams` parts of TinyStories, one after the other; BOS before each story, as the model was trained."""
    ids: list[int] = []
    for story in _stories(path):
        ids += [bos, *encode(story)]
        if len(ids) >= streams * tokens:
            break
    return [ids[at : at + tokens] for at in range(0, len(ids) - tokens + 1, tokens)][:streams]


def _stories(path: Path) -> Iterator[str]:
    for story in path.read_text(encoding="utf-8", errors="replace").split("<|endoftext|>")[:-1]:
        if story.strip():
            yield story.strip()
