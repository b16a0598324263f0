"""Work while the engine is idle, for requests that attend to a part of their prefix: compute exact rows, and reorder files.

The own rows of such a request are approximate, so they are not kept. While the engine is idle the request's prompt is
computed once more, exactly, so that the next turn finds all rows in the cache. From time to time extents' files are rewritten
with important rows together (SPEC §IV-D). On an engine that is never idle both get a small share of the work.

A reply that had reasoning is not what the next turn's prompt has of it: templates leave old reasoning out. The server tells how
that prompt will begin, and an idle engine computes these rows, exactly, as a request without a reply would. Work of callers goes
first: when a request comes, this work is given up, and goes on later from the rows that it has.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from afterglow.engine.selective import SelectiveAttention
from afterglow.request import Request, SamplingParams

MAX_WAITING = 64  # prompts that wait to be computed exactly, and replies whose next turns are; the oldest are given up
LAST_PRIORITY = 2**31 - 1  # behind all requests of callers
BUSY_SHARE = 0.1  # of the rows that are computed, and of the time, on a busy engine
REWRITE_POLL_SECONDS = 0.05  # until the engine looks again at a rewrite that is under way


@dataclass(frozen=True, slots=True)
class _ExactPrompt:
    """Hold a prompt to compute exactly, unless `expires` has passed. About `rows` rows are missing."""

    request: Request
    rows: int
    expires: float | None


class IdleWork:
    """Begin idle work between steps. For the engine's thread alone."""

    def __init__(self, selective: SelectiveAttention | None, exact: bool, interval: float) -> None:
        """`exact`: compute prompts again. `interval`: seconds between two looks for files to reorder; 0: never reorder."""
        self._selective = selective
        self._exact = exact
        self._interval = interval
        self._looked_at: float | None = None
        self._rests_until = 0.0  # until then a busy engine begins no rewrite
        self._credit = 0.0  # rows that a busy engine may compute
        self._waiting: OrderedDict[tuple[str, tuple[int, ...]], _ExactPrompt] = OrderedDict()
        self._under_way: dict[str, Request] = {}

    def __len__(self) -> int:
        """Count the prompts that wait to be computed exactly, or are being computed."""
        return len(self._waiting) + len(self._under_way)

    def add(self, request: Request, rows: int, now: float) -> None:
        """Add the prompt of a request that attended to a part of the prefix, and has computed `rows` rows by itself."""
        if self._exact:
            expires = None if request.ttl_s is None else now + request.ttl_s
            self._waiting[request.salt, tuple(request.prompt)] = _ExactPrompt(request, rows, expires)
            if len(self._waiting) > MAX_WAITING:
                self._waiting.popitem(last=False)

    def computed(self, rows: int) -> None:
        """Count rows that the engine has computed for its callers."""
        most = max((waiting.rows for waiting in self._waiting.values()), default=0)
        self._credit = min(self._credit + BUSY_SHARE * rows, most)

    def ended(self, request_id: str) -> None:
        """Note that a request has ended: one of these, or a caller's."""
        self._under_way.pop(request_id, None)

    def forget(self, belongs: Callable[[Request], bool]) -> list[str]:
        """Forget prompts of conversations that were deleted. Returns the ids of requests to cancel."""
        self._waiting = OrderedDict((key, each) for key, each in self._waiting.items() if not belongs(each.request))
        return [name for name, request in self._under_way.items() if belongs(request)]

    def begin(self, now: float, idle: bool, submit: Callable[[Request], bool]) -> bool:
        """Begin work between two steps, if it is time. `idle`: no other work waits. `submit` returns False where the queue is
        full. Returns whether an exact prompt was submitted."""
        if self._selective is None:
            return False
        self._reorder(now, idle)
        return self._recompute(now, idle, submit)

    def wakes(self, now: float) -> float | None:
        """Tell when an idle engine has to look again."""
        if self._selective is None or not self._interval or self._looked_at is None:
            return None
        loader = self._selective.loader
        if loader.rewriting:
            return now + REWRITE_POLL_SECONDS
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
            priority=LAST_PRIORITY if idle else request.priority,
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
        if self._selective is None or not self._interval:
            return
        loader = self._selective.loader
        if self._looked_at is None:
            self._looked_at = now
        if now >= self._looked_at + self._interval:
            self._looked_at = now
            loader.look()
        if loader.rewriting:
            seconds = loader.rewrite(idle or now >= self._rests_until)
            if seconds is not None:
                self._rests_until = now + seconds * (1 / BUSY_SHARE - 1)


@dataclass(slots=True)
class _NextTurn:
    """Hold the beginnings that the prompt of one next turn may have. `expires`: when they are of no use any more."""

    prompts: deque[Request]
    expires: float | None

    def is_begun_by(self, request: Request) -> bool:
        """Check whether a request's prompt begins with one of these: it computes the rest by itself."""
        return any(_begins(request.prompt, each.prompt) for each in self.prompts if request.salt == each.salt)


def _begins(prompt: Sequence[int], beginning: Sequence[int]) -> bool:
    rows = len(beginning)
    # Nearly all others differ in the last token, or are shorter.
    return len(prompt) >= rows and prompt[rows - 1] == beginning[-1] and list(prompt[:rows]) == beginning


class UpcomingPrompts:
    """Compute expected prompts one after the other. For the engine's thread alone."""

    def __init__(self) -> None:
        self._waiting: deque[_NextTurn] = deque()
        self._under_way: Request | None = None  # the first prompt of the first turn that waits

    def __len__(self) -> int:
        """Count the prompts that wait or are being computed."""
        return sum(len(turn.prompts) for turn in self._waiting)

    def add(self, prompts: Sequence[Request], now: float) -> None:
        """Add the beginnings that the prompt of one next turn may have."""
        own = deque(
            replace(
                each,
                prompt=list(each.prompt),
                sampling=SamplingParams(max_tokens=0),
                priority=LAST_PRIORITY,
                kv_retention=1.0,
            )
            for each in prompts
        )
        ttl = prompts[0].ttl_s
        self._waiting.append(_NextTurn(own, None if ttl is None else now + ttl))
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[1 if self._under_way is not None else 0]

    def begin(self, now: float, submit: Callable[[Request], bool]) -> bool:
        """Begin with the next prompt on an idle engine. `submit` returns False where there is no room. Returns whether a
        prompt was submitted."""
        if self._under_way is not None:
            return False
        while self._waiting and (at := self._waiting[0].expires) is not None and at <= now:
            self._waiting.popleft()
        if not self._waiting:
            return False
        self._under_way = self._waiting[0].prompts[0]
        if submit(self._under_way):
            return True
        self._under_way = None
        return False

    def give_way(self, request: Request) -> str | None:
        """Make way for a caller's request, and forget what it computes by itself. Returns the id of the request to cancel, which
        waits to go on."""
        stopped, self._under_way = self._under_way, None
        self._waiting = deque(turn for turn in self._waiting if not turn.is_begun_by(request))
        return stopped.id if stopped is not None else None

    def ended(self, request_id: str) -> None:
        """Note that a request has ended. A prompt that was not stopped is done."""
        if self._under_way is not None and self._under_way.id == request_id:
            self._under_way = None
            self._waiting[0].prompts.popleft()
            if not self._waiting[0].prompts:
                self._waiting.popleft()

    def forget(self, belongs: Callable[[Request], bool]) -> list[str]:
        """Forget prompts of conversations that were deleted. Returns the ids of requests to cancel."""
        first = self._waiting[0] if self._under_way is not None else None
        self._waiting = deque(turn for turn in self._waiting if not belongs(turn.prompts[0]))
        if self._under_way is None or (self._waiting and self._waiting[0] is first):
            return []
        stopped, self._under_way = self._under_way, None
        return [stopped.id]
