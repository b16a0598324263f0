"""A client for the cache endpoints of a running server, and how to find the server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from afterglow.cli.command_options import CacheAccess
from afterglow.errors import ConfigError
from afterglow.server.lifecycle.address import (
    address_of,
    asks_proxies,
    certificate_of_holder,
    client_context,
    untrusted,
)
from afterglow.store.admin import NamespaceInfo

TIMEOUT_S = 10.0
COMPUTING_S = 600.0  # for a system prompt to be computed


class ServerClient:
    """Calls the cache endpoints of one server. All methods raise ConfigError if the server does not answer or refuses."""

    def __init__(self, url: str, access: CacheAccess, certificate: str | None = None) -> None:
        base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self.url = base
        self._access = access
        self._certificate = certificate

    def sessions(self) -> list[dict[str, Any]]:
        """List conversations."""
        with self.understood():
            return list(self._ask("GET", "/v1/cache/sessions")["data"])

    def stats(self) -> dict[str, Any]:
        """Return the server's statistics."""
        return self._ask("GET", "/v1/cache/stats")

    def pin(self, name: str, pinned: bool) -> dict[str, Any]:
        """Pin or unpin a conversation."""
        return self._ask("POST", f"/v1/cache/sessions/{_quoted(name)}/{'pin' if pinned else 'unpin'}")

    def remove(self, name: str) -> dict[str, Any]:
        """Remove a conversation from all tiers."""
        return self._ask("DELETE", f"/v1/cache/sessions/{_quoted(name)}")

    def prompts(self) -> list[dict[str, Any]]:
        """List registered system prompts."""
        with self.understood():
            return list(self._ask("GET", "/v1/cache/prompts")["data"])

    def register(self, name: str, text: str) -> dict[str, Any]:
        """Register a system prompt, and wait until it is computed."""
        return self._ask("PUT", f"/v1/cache/prompts/{_quoted(name)}", {"text": text}, COMPUTING_S)

    def unregister(self, name: str) -> dict[str, Any]:
        """Unregister a system prompt."""
        return self._ask("DELETE", f"/v1/cache/prompts/{_quoted(name)}")

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """Read an answer of the server in this block. Raises: ConfigError, where the answer lacks what Afterglow's have."""
        try:
            yield
        except (LookupError, TypeError):
            raise ConfigError(
                f"the server at {self.url} answers other than Afterglow's; name one of these with --server"
            ) from None

    def _ask(self, method: str, path: str, body: object = None, timeout: float = TIMEOUT_S) -> dict[str, Any]:
        import httpx

        key, salt = self._access.api_key, self._access.cache_salt
        verify = True if self._certificate is None else client_context(self._certificate)
        try:
            answer = httpx.request(
                method,
                self.url + path,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                params={"cache_salt": salt} if salt else {},
                json=body,
                timeout=timeout,
                verify=verify,
                trust_env=asks_proxies(self.url),
            )
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise ConfigError(f"no server answers at {self.url}: {untrusted(error) or error}") from None
        if answer.status_code == 401:
            raise ConfigError(f"the server at {self.url} wants another key; give it with --api-key")
        with contextlib.suppress(ValueError):
            found = answer.json()
            if answer.status_code == 200 and isinstance(found, dict):
                return found
            with contextlib.suppress(LookupError, TypeError):
                raise ConfigError(f"the server at {self.url} says: {found['error']['message']}")
        raise ConfigError(f"the server at {self.url} answers {answer.status_code}: {json.dumps(answer.text[:200])}")


def _quoted(name: str) -> str:
    """Write a name as a part of a URL's path; dots too, for `..` would lead to another path. Raises: ConfigError."""
    try:
        return quote(name, safe="").replace(".", "%2E")
    except UnicodeEncodeError:
        raise ConfigError(f"the name {name!r} is not UTF-8, as all names of a server are") from None


def server_of(info: NamespaceInfo, access: CacheAccess) -> ServerClient:
    """Make a client for the server that holds a namespace. Raises: ConfigError, if no server holds it."""
    if info.holder is None:
        raise ConfigError(f"{info.path.name} is not held by a server")
    url = address_of(info.path)
    if url is None:
        raise ConfigError(
            f"{info.path.name} is held by {info.holder}, which does not say where it listens; try --server"
        )
    return ServerClient(url, access, certificate_of_holder(info.path))


def find_server(found: Sequence[NamespaceInfo], access: CacheAccess) -> ServerClient:
    """Make a client for the server that was named, or for the only server that holds a namespace of `found`.

    Raises: ConfigError.
    """
    if access.server is not None:
        return ServerClient(access.server, access)
    held = [info for info in found if info.holder is not None]
    if not held:
        raise ConfigError(
            "conversations have names and pins only where a server runs, and none holds a namespace here; "
            "start it with afterglow serve, or name one with --server"
        )
    if len(held) > 1:
        names = ", ".join(info.path.name for info in held)
        raise ConfigError(f"several namespaces are held ({names}); choose one with --namespace, or name a --server")
    return server_of(held[0], access)
