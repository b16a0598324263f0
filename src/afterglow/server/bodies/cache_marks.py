"""The field `cache_control` of blocks, as Anthropic has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afterglow.errors import RequestError
from afterglow.request import MAX_BREAKPOINTS
from afterglow.text.block_marks import BlockMark
from afterglow.text.chat_template import shown

LIFETIMES = {"5m": 300.0, "1h": 3600.0}  # seconds


class CacheMarks:
    """Collects the marks of a request, each with its seconds."""

    def __init__(self) -> None:
        self.found: list[tuple[BlockMark, float]] = []

    def add(self, block: Mapping[str, Any], where: str, mark: BlockMark) -> None:
        """Add the mark of a block, if it has one. Raises: RequestError."""
        if (seconds := read_lifetime(block, where)) is None:
            return
        if len(self.found) == MAX_BREAKPOINTS:
            raise RequestError(
                f"{where}: at most {MAX_BREAKPOINTS} blocks may be marked with cache_control, and this is one more",
                param=where,
            )
        self.found.append((mark, seconds))

    def add_last(self, body: Mapping[str, Any], mark: BlockMark) -> None:
        """Add the mark that the whole request asks for: of its last block. Raises: RequestError."""
        own = next((seconds for known, seconds in self.found if known == mark), None)
        if own is None:
            self.add(body, "cache_control", mark)
        elif read_lifetime(body, "cache_control") not in (None, own):
            raise RequestError(
                "cache_control.ttl: the last block is marked with another ttl; give one of them",
                param="cache_control.ttl",
            )


def read_lifetime(block: Mapping[str, Any], where: str) -> float | None:
    """Read the seconds of a block's mark; None without one. `where`: the path of the field. Raises: RequestError."""
    given = block.get("cache_control")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise RequestError(f"{where} must be an object, got {shown(given)}", param=where)
    if given.get("type") != "ephemeral":
        raise RequestError(f"{where}.type must be 'ephemeral', got {shown(given.get('type'))}", param=f"{where}.type")
    ttl = given.get("ttl")
    if ttl is None:
        ttl = "5m"
    if not isinstance(ttl, str) or ttl not in LIFETIMES:
        raise RequestError(f"{where}.ttl must be '5m' or '1h', got {shown(ttl)}", param=f"{where}.ttl")
    return LIFETIMES[ttl]
