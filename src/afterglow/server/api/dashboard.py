"""`/dashboard`: a page about the cache, drawn from the last ten minutes of the engine's numbers.

The page holds no numbers and needs no key, so that it can ask for one; `/dashboard/data` needs the admin's rights.
Numbers are sampled once a second from a snapshot that never waits, also while the page is closed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import os
import re
import time
from functools import cache
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from afterglow.errors import RequestError
from afterglow.server.access.tenants import RequestRecord
from afterglow.server.metrics.collector import flatten
from afterglow.server.metrics.history import SAMPLES, History
from afterglow.server.metrics.metric_names import TIERS
from afterglow.server.state import State
from afterglow.version import __version__

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
