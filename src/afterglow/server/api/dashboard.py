"""`/dashboard`: a page about the cache, drawn from the last ten minutes of the engine's numbers and of requests.

The page holds no numbers and needs no key, so that it can ask for one; `/dashboard/data` needs the admin's rights.
Numbers are sampled once a second from a snapshot that never waits, also while the page is closed.
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

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from afterglow.errors import RequestError
from afterglow.server.metrics.collector import PROBLEMS, flatten
from afterglow.server.metrics.metric_names import MISSES, TIERS, number_at
from afterglow.server.state import State
from afterglow.server.tenants import RequestRecord
from afterglow.version import __version__

RECENT_S = 600.0
SAMPLES = 600  # of `RECENT_S`, one a second
REQUESTS = 2000  # the latest ones whose time to the first token is kept

OF_THE_SERVER = ("process_memory_bytes", *(f"http_{problem}" for problem in PROBLEMS))  # unknown to the engine
# The numbers that the page draws: the page's name -> the path in the engine's statistics.
LEVELS = {
    "running": "plan.running",
    "waiting": "plan.waiting + plan.loading",
    "plan_loading": "plan.loading",
    **{f"{tier}_used_bytes": f"tiers.{tier}.used" for tier in TIERS},
    "plan_sessions": "plan.sessions",
    "plan_prefetch_window": "plan.prefetch_window",
    "plan_eviction_window": "plan.eviction_window",
    "plan_read_rate": "plan.read_rate",
    "plan_prefill_rate": "plan.prefill_rate",
}
TOTALS = {  # since the start; the page takes differences
    "prompt_tokens": "engine.prompt_tokens",
    "generation_tokens": "engine.generation_tokens",
    "requests_error": "engine.finished.error",
    **{f"cached_tokens_{tier}": f"engine.cached_tokens.{tier}" for tier in TIERS},
    "cached_tokens_disk": "engine.cached_tokens.disk + engine.cached_tokens.shared",  # which come by way of the disk
    **{
        f"plan_{name}": f"plan.counters.{name}"
        for name in (
            *(f"missed_{why}" for why in MISSES),
            "recomputed",
            "prefetches",
            *(f"prefetches_{how}" for how in ("useful", "late", "wasted")),
            "thrashed",
        )
    },
    **{f"{tier}_evictions": f"plan.counters.evicted_{tier}" for tier in TIERS},
    "load_bytes": "store.disk_read_bytes",
    "load_seconds": "store.disk_read_seconds",
    "store_bytes": "store.disk_write_bytes",
    "store_seconds": "store.disk_write_seconds",
    "store_host_save_bytes": "store.host_save_bytes",
    "store_host_save_seconds": "store.host_save_seconds",
}
PATHS = {**LEVELS, **TOTALS}
FIELDS = (*OF_THE_SERVER, *PATHS)

# (name, from this share of the prompt on) of requests, by how much of their prompt was cached.
# "none": a template's first tokens are nearly always cached, which is no reuse worth the name.
SHARES = (("none", 0.0), ("some", 0.1), ("half", 0.5), ("most", 0.9))
WITHOUT, WITH = ("none",), ("half", "most")  # compared at like lengths: a long prompt takes longer in any case
SHORTEST = 64  # tokens; prompts up to twice as long are alike


class Sample(NamedTuple):
    time: float  # seconds since 1970
    values: tuple[float | None, ...]  # of FIELDS; None: not known (yet)


class Answered(NamedTuple):
    """A request that has had its first token."""

    sample: int  # the number of the next sample after it
    time: float
    ttft: float
    prompt: int  # tokens, `cached` ones included
    cached: int
    per_token: float | None = None  # mean seconds of its tokens after the first

    @property
    def length(self) -> int:
        """Return the length class of the prompt: the power of two that holds it."""
        return max(SHORTEST, 1 << (self.prompt - 1).bit_length())

    @property
    def share(self) -> str:
        """Return the class of the cached share of the prompt."""
        part = self.cached / self.prompt if self.prompt else 0.0
        return next(name for name, least in reversed(SHARES) if part >= least)


class History:
    """The latest samples and requests. Bounded; lives on the event loop."""

    def __init__(self, samples: int = SAMPLES, requests: int = REQUESTS) -> None:
        self.next = 0  # the number that the next sample gets
        self._samples: deque[Sample] = deque(maxlen=samples)
        self._requests: deque[Answered] = deque(maxlen=requests)

    def sample(self, stats: Any, now: float, server: Mapping[str, float | None] | None = None) -> None:
        """Add a sample. `server`: numbers that the engine does not know."""
        table = flatten(stats)
        found = {**{name: number_at(table, path) for name, path in PATHS.items()}, **(server or {})}
        self._samples.append(Sample(now, tuple(found.get(name) for name in FIELDS)))
        self.next += 1

    def answered(self, now: float, ttft: float, prompt: int, cached: int, per_token: float | None = None) -> None:
        self._requests.append(Answered(self.next, now, ttft, prompt, cached, per_token))

    def after(self, number: int) -> dict[str, Any]:
        """Return the samples after a given one, column by column."""
        skip = max(0, number + 1 - (self.next - len(self._samples)))
        found = list(islice(self._samples, skip, None))
        columns: Sequence[Sequence[float | None]] = list(zip(*(s.values for s in found), strict=True))
        # Requests since the last sample come with the next one: a page gets each request once.
        news = [r for r in self._requests if number < r.sample < self.next]
        return {
            "last": self.next - 1,
            "time": [round(s.time, 2) for s in found],
            "values": {name: columns[i] if columns else () for i, name in enumerate(FIELDS)},
            "requests": [(round(r.time, 2), round(r.ttft, 5), r.prompt, r.cached, r.share) for r in news],
        }

    def _recent(self, now: float) -> list[Answered]:
        return [r for r in self._requests if r.time > now - RECENT_S]

    def ttft(self, now: float) -> dict[str, Any]:
        """Compare times to the first token with and without reuse, in the last ten minutes, at like lengths of the prompt.
        `sooner`: how many times as fast reuse was, over the lengths that have both kinds of requests."""
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
        """Return the seconds between tokens, over the replies of the last ten minutes."""
        times = [r.per_token for r in self._recent(now) if r.per_token is not None]
        return {"requests": len(times), "median": _quantile(times, 0.5), "p95": _quantile(times, 0.95)}


def _quantile(values: Sequence[float], part: float) -> float | None:
    """Return the smallest value that at least this part of the values do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(part * len(ordered)) - 1] if ordered else None


log = logging.getLogger("afterglow.server")

PATH = "/dashboard"
INTERVAL = 1.0  # seconds between two samples


def resident_bytes() -> float | None:
    """Return the resident memory of this process, where /proc tells it."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return float(int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):
        return None


class Dashboard:
    """Samples the engine's numbers and describes them for the page."""

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
            due = max(due + INTERVAL, loop.time())  # samples that a busy loop missed are not made up for
            await asyncio.sleep(due - loop.time())

    def sample(self) -> None:
        """Add a sample to the history."""
        try:
            self.history.sample(self._state.engine.stats(), time.time(), self._server())
        except Exception:  # a page without numbers must not end the server
            if not self._failed:
                log.exception("the dashboard got no statistics")
            self._failed = True

    def _server(self) -> dict[str, float | None]:
        problems = {f"http_{problem}": float(n) for problem, n in self._state.metrics.problems.items()}
        return {"process_memory_bytes": resident_bytes(), **problems}

    def note(self, record: RequestRecord) -> None:
        """Add a finished request to the history."""
        if record.ttft is not None and record.prompt_tokens:
            times = record.per_token
            per_token = sum(times) / len(times) if times else None
            self.history.answered(time.time(), record.ttft, record.prompt_tokens, record.cached.total, per_token)

    def data(self, after: int) -> dict[str, Any]:
        """Describe the server, and the samples after number `after`."""
        engine = self._state.engine
        table = flatten(engine.stats())
        draining = self._state.bridge.draining
        return {
            "object": "dashboard",
            "run": self.run,
            "version": __version__,
            "model": self._state.models.names[0],
            "status": "stopped" if not engine.healthy else "draining" if draining else "running",
            "now": time.time(),
            "started": self._state.created,
            "interval": INTERVAL,
            "samples": SAMPLES,
            "budgets": {tier: table[f"tiers.{tier}.capacity"] for tier in TIERS},
            "ttft": self.history.ttft(time.time()),
            "per_token": self.history.per_token(time.time()),
            "history": self.history.after(after),
        }


def add_dashboard(app: Starlette, state: State) -> None:
    """Add the page and its sampling. Call it after all other middleware is added: the page needs no key."""
    app.state.dashboard = dashboard = Dashboard(state)
    app.add_middleware(DashboardMiddleware, dashboard=dashboard)


async def dashboard_data(http: HttpRequest) -> Response:
    """Return numbers of all tenants together, from the sample after number `?after=` on."""
    record: RequestRecord = http.scope["afterglow.record"]
    record.caller.check_admin()
    asked = http.query_params.get("after", "-1")
    if not re.fullmatch(r"-1|\d{1,15}", asked, re.ASCII):
        raise RequestError(f"after must be the number of a sample, got {asked[:40]!r}", param="after")
    dashboard: Dashboard = http.app.state.dashboard
    return JSONResponse(dashboard.data(int(asked)), headers={"Cache-Control": "no-store"})


class DashboardMiddleware:
    """Runs before all other middleware: serves the page, samples while the server runs, notes finished requests."""

    def __init__(self, app: ASGIApp, dashboard: Dashboard) -> None:
        self._app = app
        self._dashboard = dashboard

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
                    self._dashboard.note(record)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._dashboard.watch())
        try:
            await self._app(scope, receive, send)
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher


@cache
def page() -> Response:
    """Build the page with its plotting library inside; its policy allows no other script."""
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
    """Hash the page's own scripts, or styles, for the content security policy."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode() for inner in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
