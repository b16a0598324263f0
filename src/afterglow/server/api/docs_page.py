"""`/openapi.json`, and `/docs`: a page that shows it and loads nothing from other servers."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from afterglow.server.api.openapi import document
from afterglow.server.json import to_json
from afterglow.server.state import State

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"
)


async def openapi(http: Request) -> Response:
    """Describe the server's requests and answers."""
    state: State = http.app.state.afterglow
    return Response(_written(bool(state.config.api_key or state.config.admin_key)), media_type="application/json")


async def docs(http: Request) -> Response:
    """Show the description as a page."""
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
    page = files("afterglow.server").joinpath("static/docs.html").read_bytes()
    return Response(page, media_type="text/html; charset=utf-8", headers=headers)


@cache
def _written(keys: bool) -> bytes:
    return to_json(document(keys=keys))
