"""What is done beside requests that attend to a part of their prefix: exact rows for the cache, and reordering on disk.

Such a request's own rows are approximate, so they are not kept (spec X3). When nothing else is to be done its prompt is
computed once more, exactly, so that the next turn finds all of it. And now and then important rows are put together on disk
(SPEC §IV-D).
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from afterglow.engine.important import Important
from afterglow.request import Request, SamplingParams

MOST = 64  # prompts that wait to be computed exactly; the oldest are given up
LAST = 2**31 - 1  # the priority of such a request: behind everybody


class Aside:
    """Work for an idle engine; its thread's alone."""

    def __init__(self, important: Important | None, exact: bool, interval: float) -> None:
        """`exact`: compute prompts again. `interval`: seconds between reorderings; 0: never."""
        self._important = important
        self._exact = exact
        self._interval = interval
        self._reordered_at: float | None = None
        self._waiting: OrderedDict[tuple[str, tuple[int, ...]], Request] = OrderedDict()

    def add(self, request: Request) -> None:
        """A request has ended that attended to a part of its prefix."""
        if self._exact:
            self._waiting[request.salt, tuple(request.prompt)] = request
            if len(self._waiting) > MOST:
                self._waiting.popitem(last=False)

    def turn(self, now: float, submit: Callable[[Request], None]) -> bool:
        """Nothing else is to be done: begin something. False if there is nothing."""
        if self._important is None:
            return False
        self._reorder(now)
        if not self._waiting:
            return False
        _, request = self._waiting.popitem(last=False)
        submit(
            replace(
                request,
                id=f"exact-{uuid.uuid4().hex}",
                sampling=SamplingParams(max_tokens=0),
                session_id=None,
                priority=LAST,
                kv_retention=1.0,
            )
        )
        return True

    def _reorder(self, now: float) -> None:
        if self._reordered_at is None:
            self._reordered_at = now
        if self._important is not None and self._interval and now >= self._reordered_at + self._interval:
            self._reordered_at = now
            self._important.loader.reorder()
