"""What is done beside requests that attend to a part of their prefix: exact rows for the cache, and reordering on disk.

Such a request's own rows are approximate, so they are not kept (spec X3). When nothing else is to be done its prompt is
computed once more, exactly, so that the next turn finds all of it. And now and then important rows are put together on disk
(SPEC §IV-D). Where the engine is never idle both have a share of its work, so that they are late and not never.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from afterglow.engine.important import Important
from afterglow.request import Request, SamplingParams

MOST = 64  # prompts that wait to be computed exactly; the oldest are given up
LAST = 2**31 - 1  # the priority of such a request on an idle engine: behind everybody
SHARE = 0.1  # of the rows that are computed, and of the time, where others keep the engine busy
SOON = 0.05  # seconds until a rewriting that is under way is looked at again


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A prompt that is to be computed exactly: about `rows` rows of it are missing. Not after `expires`."""

    request: Request
    rows: int
    expires: float | None


class Aside:
    """Work beside that of callers; its thread's alone."""

    def __init__(self, important: Important | None, exact: bool, interval: float) -> None:
        """`exact`: compute prompts again. `interval`: seconds between reorderings; 0: never."""
        self._important = important
        self._exact = exact
        self._interval = interval
        self._looked_at: float | None = None
        self._rests_until = 0.0  # with rewriting, while others keep the engine busy
        self._credit = 0.0  # rows that may be computed while they do
        self._waiting: OrderedDict[tuple[str, tuple[int, ...]], _Waiting] = OrderedDict()
        self._under_way: dict[str, Request] = {}

    def __len__(self) -> int:
        """Prompts that wait to be computed exactly, or are being."""
        return len(self._waiting) + len(self._under_way)

    def add(self, request: Request, rows: int, now: float) -> None:
        """A request has ended that attended to a part of its prefix, and has computed so many rows by itself."""
        if self._exact:
            expires = None if request.ttl_s is None else now + request.ttl_s
            self._waiting[request.salt, tuple(request.prompt)] = _Waiting(request, rows, expires)
            if len(self._waiting) > MOST:
                self._waiting.popitem(last=False)

    def computed(self, rows: int) -> None:
        """The engine has computed so many rows for its callers."""
        most = max((waiting.rows for waiting in self._waiting.values()), default=0)
        self._credit = min(self._credit + SHARE * rows, most)

    def ended(self, request_id: str) -> None:
        """A request has ended, perhaps one of these."""
        self._under_way.pop(request_id, None)

    def forget(self, belongs: Callable[[Request], bool]) -> list[str]:
        """What has been deleted is not to be computed again. Returns ids of requests that do, to be cancelled."""
        self._waiting = OrderedDict((key, each) for key, each in self._waiting.items() if not belongs(each.request))
        return [name for name, request in self._under_way.items() if belongs(request)]

    def turn(self, now: float, idle: bool, submit: Callable[[Request], bool]) -> bool:
        """Between two steps; `idle`: nothing else is to be done. Begins something, if it is time. `submit`: False where there is
        no room in the queue. Returns whether there is something to do now."""
        if self._important is None:
            return False
        self._reorder(now, idle)
        return self._recompute(now, idle, submit)

    def wakes(self, now: float) -> float | None:
        """When an idle engine is to look again."""
        if self._important is None or not self._interval or self._looked_at is None:
            return None
        loader = self._important.loader
        if loader.rewriting:
            return now + SOON
        return self._looked_at + self._interval if loader.changed else None

    def _recompute(self, now: float, idle: bool, submit: Callable[[Request], bool]) -> bool:
        for key in [key for key, each in self._waiting.items() if each.expires is not None and each.expires <= now]:
            del self._waiting[key]
        if not self._waiting or self._under_way:
            return False
        key, (request, rows) = next((key, (each.request, each.rows)) for key, each in self._waiting.items())
        if not idle and self._credit < rows:
            return False
        own = replace(
            request,
            id=f"exact-{uuid.uuid4().hex}",
            sampling=SamplingParams(max_tokens=0),
            priority=LAST if idle else request.priority,
            kv_retention=1.0,
        )
        self._under_way[own.id] = own
        if not submit(own):
            del self._under_way[own.id]
            return False
        del self._waiting[key]
        self._credit = 0.0
        return True

    def _reorder(self, now: float, idle: bool) -> None:
        if self._important is None or not self._interval:
            return
        loader = self._important.loader
        if self._looked_at is None:
            self._looked_at = now
        if now >= self._looked_at + self._interval:
            self._looked_at = now
            loader.look()
        if loader.rewriting:
            seconds = loader.rewrite(idle or now >= self._rests_until)
            if seconds is not None:
                self._rests_until = now + seconds * (1 / SHARE - 1)
