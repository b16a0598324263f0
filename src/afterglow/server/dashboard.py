"""`/dashboard`: one page about the cache, and the last ten minutes of the engine's numbers to draw it from.

The page itself says nothing and is served to everybody, so that it can ask for a key; `/dashboard/data` has the
rights of `/metrics`. Numbers are sampled once a second, from a snapshot that never waits, whether anybody looks or not.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import islice
from typing import Any, NamedTuple

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from afterglow import __version__
from afterglow.errors import RequestError
from afterglow.server.metrics import PROBLEMS, flatten
from afterglow.server.state import Record, State

log = logging.getLogger("afterglow.server")

PATH = "/dashboard"
INTERVAL = 1.0  # seconds between two samples
SAMPLES = 600  # ten minutes
REQUESTS = 2000  # the latest ones whose time to the first token is kept

_TIERS = ("device", "host", "disk")
OF_THE_SERVER = ("process_memory_bytes", *(f"http_{problem}" for problem in PROBLEMS))  # not of the engine
LEVELS = (
    "process_memory_bytes",
    "running",
    "waiting",
    "plan_loading",
    "device_used_bytes",
    "host_used_bytes",
    "disk_used_bytes",
    "plan_sessions",
    "plan_prefetch_window",
    "plan_eviction_window",
    "plan_read_rate",
    "plan_prefill_rate",
)
TOTALS = (  # since the start; whoever draws takes differences
    "prompt_tokens",
    "generation_tokens",
    "requests_error",
    *(f"http_{problem}" for problem in PROBLEMS),
    *(f"cached_tokens_{tier}" for tier in _TIERS),
    *(f"plan_missed_{why}" for why in ("cold", "evicted", "expired", "damaged", "deleted", "salt")),
    "plan_recomputed",
    "plan_prefetches",
    *(f"plan_prefetches_{how}" for how in ("useful", "late", "wasted")),
    "plan_thrashed",
    *(f"{tier}_evictions" for tier in _TIERS),
    "load_bytes",
    "load_seconds",
    "store_bytes",
    "store_seconds",
    "store_host_save_bytes",
    "store_host_save_seconds",
)
FIELDS = (*LEVELS, *TOTALS)

# (name, from this share of the prompt on) of requests, by how much of their prompt was cached.
# "none": a template's first tokens are nearly always there, and are no reuse worth the name.
SHARES = (("none", 0.0), ("some", 0.1), ("half", 0.5), ("most", 0.9))
WITHOUT, WITH = ("none",), ("half", "most")  # what is compared, at like lengths: a long prompt takes longer in any case
SHORTEST = 64  # tokens; prompts up to twice as long are alike


class Sample(NamedTuple):
    time: float  # seconds since 1970
    values: tuple[float | None, ...]  # of FIELDS; None: not known (yet)


class Answered(NamedTuple):
    """A request that has had its first token."""

    sample: int  # the number of the next sample after it
    time: float
    ttft: float
    prompt: int  # tokens, and how many of them were cached
    cached: int
    per_token: float | None = None  # mean seconds of its tokens after the first

    @property
    def length(self) -> int:
        """At most so many tokens, and more than half as many, has its prompt."""
        return max(SHORTEST, 1 << (self.prompt - 1).bit_length())

    @property
    def share(self) -> str:
        part = self.cached / self.prompt if self.prompt else 0.0
        return next(name for name, least in reversed(SHARES) if part >= least)


class History:
    """The latest samples and requests. Bounded; lives on the event loop."""

    def __init__(self, samples: int = SAMPLES, requests: int = REQUESTS) -> None:
        self.next = 0  # the number that the next sample gets
        self._samples: deque[Sample] = deque(maxlen=samples)
        self._requests: deque[Answered] = deque(maxlen=requests)

    def sample(self, stats: Any, now: float, server: Mapping[str, float | None] | None = None) -> None:
        """`server`: the numbers that the engine does not know."""
        table = {**flatten(stats), **(server or {})}
        self._samples.append(Sample(now, tuple(table.get(name) for name in FIELDS)))
        self.next += 1

    def answered(self, now: float, ttft: float, prompt: int, cached: int, per_token: float | None = None) -> None:
        self._requests.append(Answered(self.next, now, ttft, prompt, cached, per_token))

    def after(self, number: int) -> dict[str, Any]:
        """What came after a sample, column by column."""
        skip = max(0, number + 1 - (self.next - len(self._samples)))
        found = list(islice(self._samples, skip, None))
        columns: Sequence[Sequence[float | None]] = list(zip(*(s.values for s in found), strict=True))
        # Those since the last sample are told with the next one: nobody is told of a request twice.
        news = [r for r in self._requests if number < r.sample < self.next]
        return {
            "last": self.next - 1,
            "time": [round(s.time, 2) for s in found],
            "values": {name: columns[i] if columns else () for i, name in enumerate(FIELDS)},
            "requests": [(round(r.time, 2), round(r.ttft, 5), r.prompt, r.cached, r.share) for r in news],
        }

    def _recent(self, now: float) -> list[Answered]:
        return [r for r in self._requests if r.time > now - SAMPLES * INTERVAL]

    def ttft(self, now: float) -> dict[str, Any]:
        """Times to the first token of the last ten minutes with and without reuse, at like lengths of the prompt; and how
        many times sooner it came with reuse, over the lengths of which there were both."""
        recent = self._recent(now)
        lengths, weights, logs = [], 0, 0.0
        for length in sorted({r.length for r in recent}):
            groups = [
                [r.ttft for r in recent if r.length == length and r.share in shares] for shares in (WITHOUT, WITH)
            ]
            without, reused = (
                {"requests": len(g), "median": _quantile(g, 0.5), "p95": _quantile(g, 0.95)} for g in groups
            )
            lengths.append({"tokens": length, "without": without, "with": reused})
            slow, fast = without["median"], reused["median"]
            if slow is not None and fast:
                weight = min(map(len, groups))
                weights += weight
                logs += weight * math.log(slow / fast)
        return {"lengths": lengths, "sooner": math.exp(logs / weights) if weights else None}

    def per_token(self, now: float) -> dict[str, Any]:
        """Seconds between the tokens of a reply, of the last ten minutes."""
        times = [r.per_token for r in self._recent(now) if r.per_token is not None]
        return {"requests": len(times), "median": _quantile(times, 0.5), "p95": _quantile(times, 0.95)}


def _quantile(values: Sequence[float], part: float) -> float | None:
    """The smallest value that so many of them do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(part * len(ordered)) - 1] if ordered else None


def resident_bytes() -> float | None:
    """The memory of this process, where the system says it without looking at a disk."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return float(int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):
        return None


class Board:
    """The dashboard of one server: its history, and whoever keeps it."""

    def __init__(self, state: State) -> None:
        self.history = History()
        self.run = f"{time.time_ns():x}"  # tells a restarted server from the one before
        self._state = state
        self._failed = False

    async def watch(self) -> None:
        """Sample until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self.sample()
            due = max(due + INTERVAL, loop.time())  # what was missed while the loop was busy is not made up for
            await asyncio.sleep(due - loop.time())

    def sample(self) -> None:
        try:
            self.history.sample(self._state.engine.stats(), time.time(), self._server())
        except Exception:  # a page without numbers is no reason to end anything
            if not self._failed:
                log.exception("the dashboard got no statistics")
            self._failed = True

    def _server(self) -> dict[str, float | None]:
        problems = {f"http_{problem}": float(n) for problem, n in self._state.metrics.problems.items()}
        return {"process_memory_bytes": resident_bytes(), **problems}

    def note(self, record: Record) -> None:
        """A request has ended."""
        if record.ttft is not None and record.prompt_tokens:
            times = record.per_token
            per_token = sum(times) / len(times) if times else None
            self.history.answered(time.time(), record.ttft, record.prompt_tokens, record.cached.total, per_token)

    def data(self, after: int) -> dict[str, Any]:
        engine = self._state.engine
        capacity = flatten(engine.stats())
        draining = self._state.jobs.draining
        return {
            "object": "dashboard",
            "run": self.run,
            "version": __version__,
            "model": self._state.names[0],
            "status": "stopped" if not engine.healthy else "draining" if draining else "running",
            "now": time.time(),
            "started": self._state.created,
            "interval": INTERVAL,
            "samples": SAMPLES,
            "budgets": {tier: capacity.get(f"{tier}_capacity_bytes") for tier in _TIERS},
            "ttft": self.history.ttft(time.time()),
            "per_token": self.history.per_token(time.time()),
            "history": self.history.after(after),
        }


def add_dashboard(app: FastAPI, state: State) -> None:
    """Add the page, its data and the keeping of its history. After all other middleware: the page goes before keys."""
    app.state.dashboard = board = Board(state)
    app.add_middleware(_Front, board=board)
    app.add_api_route(f"{PATH}/data", dashboard_data, methods=["GET"], include_in_schema=False)


async def dashboard_data(http: HttpRequest) -> Response:
    """Numbers of all tenants together, from the sample after number `?after=` on."""
    record: Record = http.scope["afterglow.record"]
    record.caller.check_admin()
    asked = http.query_params.get("after", "-1")
    if not re.fullmatch(r"-1|\d{1,15}", asked, re.ASCII):
        raise RequestError(f"after must be the number of a sample, got {asked[:40]!r}", param="after")
    board: Board = http.app.state.dashboard
    return JSONResponse(board.data(int(asked)), headers={"Cache-Control": "no-store"})


class _Front:
    """Before everything else: serves the page, samples while the server runs, notes what requests took."""

    def __init__(self, app: ASGIApp, board: Board) -> None:
        self._app = app
        self._board = board

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD"):
            await RedirectResponse(PATH.removeprefix("/"))(
                scope, receive, send
            )  # relative: there may be a proxy's path before it
        elif scope["type"] == "http" and scope["path"] == PATH and scope["method"] in ("GET", "HEAD"):
            await page()(scope, receive, send)
        else:
            try:
                await self._app(scope, receive, send)
            finally:
                if (record := scope.get("afterglow.record")) is not None:
                    self._board.note(record)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._board.watch())
        try:
            await self._app(scope, receive, send)
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher


@cache
def page() -> Response:
    """The page with its library in it: one file, which runs nothing but what it came with."""
    folder = files("afterglow") / "server" / "static"

    def read(name: str) -> str:
        return (folder / name).read_text("utf-8").strip()

    text = read("dashboard.html")
    for mark, name in (
        ("LICENCE-OF-UPLOT", "uplot/LICENSE"),
        ("/*STYLE-OF-UPLOT*/", "uplot/uPlot.min.css"),
        ("/*SCRIPT-OF-UPLOT*/", "uplot/uPlot.iife.min.js"),
    ):
        text = text.replace(mark, read(name), 1)
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(text, "script"),
        "style-src": _hashes(text, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return Response(
        text,
        media_type="text/html; charset=utf-8",
        headers={
            "Content-Security-Policy": "; ".join(f"{what} {where}" for what, where in policy.items()),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )


def _hashes(text: str, tag: str) -> str:
    """The page's own scripts, or styles, as a policy names them."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode() for inner in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
