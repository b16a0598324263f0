"""`/openapi.json`, and `/docs`: a page that shows it and loads nothing from other servers."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from afterglow.server.api.openapi import document
from afterglow.server.json import to_json
from afterglow.server.server_config import ServerConfig


def add_docs(app: FastAPI, config: ServerConfig) -> None:
    written = to_json(document(keys=bool(config.api_key or config.admin_key)))
    page = files("afterglow.server").joinpath("static/docs.html").read_bytes()

    async def openapi(request: Request) -> Response:
        return Response(written, media_type="application/json")

    async def docs(request: Request) -> Response:
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    app.add_api_route("/openapi.json", openapi, methods=["GET"], include_in_schema=False)
    app.add_api_route("/docs", docs, methods=["GET"], include_in_schema=False)


POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"
)
