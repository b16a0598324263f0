"""Prompts that are expected to come: computed while the engine is idle, so that they find their rows cached.

A reply that had reasoning is not what the next turn's prompt has of it: templates leave old reasoning out. The server tells how that
prompt will begin, and an idle engine computes these rows, exactly, as a request without a reply would. Work of callers goes
first: when a request comes, this work is given up, and goes on later from the rows that it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from afterglow.request import Request, SamplingParams

MAX_WAITING = 64  # replies whose next turns are computed; the oldest are given up
LAST_PRIORITY = 2**31 - 1  # behind all requests of callers


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
