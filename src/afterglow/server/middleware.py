"""The checks before every route: web page, API key, type and size of the body. Also request ids and the access log.

Plain ASGI: Starlette's middleware class would buffer streams and swallow disconnects.

A browser sends requests to this server for any page that its user has open. API keys keep pages out, because a page does not know them.
Without keys, two headers that a page cannot forge do: `Host` has to be a known name of this server (a page can point its own name at any
address), and `Origin`, if there is one, has to be the server's own or a configured one.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from afterglow.errors import RequestError
from afterglow.server.json_responses import CLIENT_GONE, ClientGone, error_response, for_anthropic
from afterglow.server.server_config import ServerConfig
from afterglow.server.state import State
from afterglow.server.tenants import RequestRecord

METHODS = "GET, POST, PUT, DELETE"
EXPOSED = "X-Request-ID, Request-ID, Retry-After"
REMEMBER_S = 600  # how long a browser may remember the answer to a preflight


class BrowserPolicy:
    """Decides which hosts and origins are served, and adds the CORS headers."""

    def __init__(self, config: ServerConfig) -> None:
        self._open = not config.api_key
        self._origins = {origin.lower() for origin in config.cors_origin}
        self._hosts = {"localhost", config.host.lower(), *(name.lower().rstrip(".") for name in config.allowed_host)}
        if config.host in ("0.0.0.0", "::"):
            self._hosts.add(socket.gethostname().lower())  # by which other machines find it

    def check(self, method: str, headers: Headers) -> None:
        """Refuse a request of a page that may not use this server. Raises: RequestError."""
        host, origin = headers.get("host"), headers.get("origin")
        if self._open and host is not None and not self._knows(host):
            raise RequestError(
                f"this server does not go by the name {_name(host)[:80]!r}; allow it with --allowed-host, or use an IP "
                "address or localhost",
                status=403,
                code="host_not_allowed",
            )
        if origin is None or self.allows(origin) or _same(origin, host or ""):
            return
        if self._open or _preflight(method, headers):
            raise RequestError(
                f"pages of {origin[:80]!r} may not use this server; allow them with --cors-origin",
                status=403,
                code="origin_not_allowed",
            )

    def preflight(self, method: str, headers: Headers) -> Response | None:
        """Answer a browser that asks whether a page may send its request; None for all other requests."""
        if not _preflight(method, headers):
            return None
        answer = {
            "Access-Control-Allow-Methods": METHODS,
            "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "Content-Type"),
            "Access-Control-Max-Age": str(REMEMBER_S),
        }
        if "access-control-request-private-network" in headers:
            answer["Access-Control-Allow-Private-Network"] = "true"
        return Response(status_code=204, headers=answer)

    def mark(self, origin: str | None, headers: MutableHeaders) -> None:
        """Add the headers that let the page read a response."""
        if not self._origins:
            return
        headers.add_vary_header("Origin")
        if origin is not None and self.allows(origin):
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = EXPOSED

    def allows(self, origin: str) -> bool:
        """Check whether pages of an origin may use this server."""
        return "*" in self._origins or origin.lower() in self._origins

    def _knows(self, host: str) -> bool:
        name = _name(host)
        if name in self._hosts or "*" in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _preflight(method: str, headers: Headers) -> bool:
    return method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def _split(authority: str) -> tuple[str, str]:
    """Split a `Host` header, or the end of an origin, into name and port."""
    authority = authority.lower()
    name, colon, port = authority.rpartition(":")
    if not colon or not (port.isdecimal() or not port) or authority.endswith("]"):
        name, port = authority, ""
    return name.strip("[]").rstrip("."), port


def _name(host: str) -> str:
    return _split(host)[0]


def _same(origin: str, host: str) -> bool:
    """Check whether a page comes from this server. A proxy may have added TLS, so only name and port count."""
    scheme, _, authority = origin.partition("://")
    default = {"http": "80", "https": "443"}.get(scheme.lower())
    if default is None:
        return False
    (name, port), (own, own_port) = _split(authority), _split(host)
    return (name, port or default) == (own, own_port or default)


log = logging.getLogger("afterglow.server")
access = logging.getLogger("afterglow.access")

OPEN_PATHS = ("/health", "/docs", "/openapi.json")
METRICS_PATH = "/metrics"
QUIET_PATHS = ("/health", "/metrics", "/dashboard/data", "/v1/cache/sessions")  # polled all day long by machines
MAX_REQUEST_ID = 128


class Middleware:
    """Checks each HTTP request, runs its route, and accounts for it."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app = app
        self._state = state
        self._browsers = BrowserPolicy(state.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        record = RequestRecord(request_id=given if 0 < len(given) <= MAX_REQUEST_ID else uuid.uuid4().hex)
        scope["afterglow.record"], scope["afterglow.state"] = record, self._state
        status = 0

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered["X-Request-ID"] = record.request_id
                if for_anthropic(scope):
                    answered["request-id"] = record.request_id
                self._browsers.mark(headers.get("origin"), answered)
            await send(message)

        try:
            try:
                self._browsers.check(scope["method"], headers)
                if (answer := self._browsers.preflight(scope["method"], headers)) is not None:
                    await answer(scope, receive, watched_send)
                    return
                self._check_key(scope["path"], headers, record)
                _check_json(scope["method"], headers)
                limited = _limit(receive, headers, self._state.config.max_body)
                await self._app(scope, limited, watched_send)
            except RequestError as error:
                await error_response(error, scope)(scope, receive, watched_send)
            except ClientGone:
                status = CLIENT_GONE
            except Exception:
                log.exception("request %s failed", record.request_id)
                if status:
                    raise  # the response has begun: the connection must be cut
                internal = RequestError("internal error", status=500)
                await error_response(internal, scope)(scope, receive, watched_send)
        finally:
            self._account(scope, record, status or CLIENT_GONE)
            if record.large:
                self._state.bodies.trim_soon()

    def _check_key(self, path: str, headers: Headers, record: RequestRecord) -> None:
        if path in OPEN_PATHS:
            return
        tenants = self._state.tenants
        # Anthropic's clients send the second one, some of them both.
        offered = [headers.get("authorization"), f"Bearer {headers.get('x-api-key', '')}"]
        found = (tenants.identify(each) for each in offered if each is not None)
        caller = next((caller for caller in found if caller is not None), None)
        if caller is None:
            raise RequestError(
                "wrong or missing API key; send it as 'Authorization: Bearer KEY', or as 'X-Api-Key: KEY'",
                status=401,
                code="invalid_api_key",
            )
        if caller.metrics and path != METRICS_PATH:
            raise RequestError(f"this key opens {METRICS_PATH} alone", status=403, code="metrics_key_only")
        record.caller = caller

    def _account(self, scope: Scope, record: RequestRecord, status: int) -> None:
        """Count a finished request, and write its line in the access log."""
        seconds = time.perf_counter() - record.began
        metrics = self._state.metrics
        metrics.response(status)
        details = ""
        if record.prompt_tokens is not None:
            metrics.latency.observe(seconds)
            self._state.tenants.count(record.caller, record.prompt_tokens, record.generated, record.cached)
            if record.ttft is not None:
                metrics.ttft.observe(record.ttft)
            found = ", ".join(f"{tier} {count}" for tier, count in record.cached.by_tier().items() if count)
            details = (
                f" prompt={record.prompt_tokens} cached={record.cached.total}{f' ({found})' if found else ''}"
                f" generated={record.generated}"
                + (f" ttft={record.ttft * 1e3:.0f}ms" if record.ttft is not None else "")
            )
        level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
        if record.note:
            details += f" {record.note}"
        client = scope["client"][0] if scope.get("client") else "-"
        access.log(
            level,
            "%s %s %s %d%s time=%.0fms",
            client,
            scope["method"],
            _plain(scope["path"]),
            status,
            details,
            seconds * 1e3,
        )


def _check_json(method: str, headers: Headers) -> None:
    """Refuse bodies that are not declared as JSON: a web page that sends without a preflight never declares it."""
    kind = headers.get("content-type", "")
    plain = kind.partition(";")[0].strip().lower()
    bare = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    if method in ("GET", "HEAD", "OPTIONS") or bare or plain == "application/json" or plain.endswith("+json"):
        return
    raise RequestError(
        f"the body must be JSON with the header 'Content-Type: application/json', got {kind[:80]!r}",
        status=415,
        code="unsupported_media_type",
    )


def _limit(receive: Receive, headers: Headers, max_body: int) -> Receive:
    """Wrap `receive`: refuse a body as soon as its declared or its received length is too large."""
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_body:
        raise _too_large(max_body)
    size = 0

    async def limited() -> Message:
        nonlocal size
        message = await receive()
        if message["type"] == "http.request":
            size += len(message.get("body", b""))
            if size > max_body:
                raise _too_large(max_body)
        return message

    return limited


def _plain(path: str) -> str:
    """Quote a path with unusual characters: %0a in a path must not begin another line of the log."""
    return path if path.isprintable() and " " not in path else repr(path)


def _too_large(max_body: int) -> RequestError:
    return RequestError(
        f"the request body is larger than {max_body} bytes (--max-body)", status=413, code="body_too_large"
    )
