"""Checks of web pages: a browser sends requests to this server for any page that its user has open.

API keys keep pages out, because a page does not know them. Without keys, two headers that a page cannot forge do:
`Host` has to be a known name of this server (a page can point its own name at any address), and `Origin`, if there is
one, has to be the server's own or a configured one.
"""

from __future__ import annotations

import ipaddress
import socket

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from afterglow.errors import RequestError
from afterglow.server.server_config import ServerConfig

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
