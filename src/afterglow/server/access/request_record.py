"""The record of one HTTP request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from afterglow.request import CachedTokens
from afterglow.server.access.tenants import Caller


@dataclass(slots=True)
class RequestRecord:
    """The numbers of one HTTP request, for its line in the log and for the metrics."""

    began: float = field(default_factory=time.perf_counter)
    request_id: str = ""
    caller: Caller = field(default_factory=Caller)
    prompt_tokens: int | None = None  # None: the request generates no tokens
    cached: CachedTokens = field(default_factory=CachedTokens)
    generated: int = 0
    ttft: float | None = None
    last_token: float = 0.0
    per_token: list[float] = field(
        default_factory=list
    )  # a number per reply: mean seconds of its tokens after the first
    note: str = ""  # for the log
    large: bool = False  # the body was parsed in the other process
