"""What listings of a cache say of its conversations and its registered prefixes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """Describes a cached conversation. `tokens`: its known rows; the tiers count rows where they are fastest to reach."""

    name: str
    tokens: int
    device: int
    host: int
    disk: int
    last_used: float  # seconds since 1970
    expires: float | None
    pinned: bool


@dataclass(frozen=True, slots=True)
class PrefixInfo:
    """Describes a registered prefix: its tokens, and how many are in each tier (they are kept in all).

    `shared`: the prefix is the operator's, for all tenants. `cached`: tokens that need not be computed when it was
    registered. `about`: a text that the caller gave, kept with the prefix.
    """

    name: str
    tokens: int
    device: int
    host: int
    disk: int
    shared: bool
    cached: int = 0
    about: str = ""
