"""API keys: whose caches a request may see, and who may see and change everybody's.

A tenant is an API key. Its name, made from the key, is a part of every salt that reaches the engine, so that no two
keys ever share rows, whatever a client sends as `cache_salt`, over restarts as well.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from afterglow.errors import RequestError
from afterglow.request import CachedTokens


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `tenant` identifies the API key without being it; empty where there are no keys."""

    tenant: str = ""
    admin: bool = False
    metrics: bool = False  # may see metrics, and nothing else
    urgent: bool = False  # may its requests go before others'?

    def check_metrics(self) -> None:
        """Errors: RequestError, if the caller may not see metrics."""
        if not self.metrics:
            self.check_admin()

    def check_priority(self, priority: int) -> None:
        """Errors: RequestError, for one with which a request goes before others', if this is not for the caller."""
        if priority < 0 and not (self.admin or self.urgent):
            raise RequestError(
                f"priority {priority} goes before the requests of others, which this key may not; use 0 or more, or ask the"
                " operator for --urgent-key",
                status=403,
                param="priority",
                code="priority_not_allowed",
            )

    def check_admin(self) -> None:
        """Errors: RequestError, if this is not for the caller."""
        if not self.admin:
            raise RequestError(
                "this shows or changes what belongs to all tenants; it needs the key that --admin-key gives",
                status=403,
                code="admin_key_required",
            )


@dataclass(slots=True)
class Usage:
    """What a tenant has asked for since the server's start."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    device: int = 0
    host: int = 0
    disk: int = 0


class Tenants:
    """Who may do what. Of everybody's affairs in charge is the admin key; without one the only API key; without
    either everybody. With several API keys and no admin key nobody is."""

    def __init__(
        self,
        keys: Sequence[str],
        admin_key: str | None = None,
        metrics_key: str | None = None,
        urgent: Sequence[str] = (),
    ) -> None:
        """`urgent`: those of the keys whose requests may go before others'."""
        # A slow hash, once per key: the identifier ends up in cache ids and must not give the key away.
        self._keys = [(_digest(key), _slow_id(key)) for key in dict.fromkeys(keys)]
        self._admin = (_digest(admin_key), _slow_id(admin_key)) if admin_key else None
        self._metrics = _digest(metrics_key) if metrics_key else None
        self._urgent = {_slow_id(key) for key in urgent}
        self._usage: dict[str, Usage] = {}

    def identify(self, authorization: str) -> Caller | None:
        """The owner of an Authorization header; None for a wrong key. All keys are compared, in constant time."""
        scheme, _, key = authorization.partition(" ")
        offered = _digest(key.strip()) if scheme.lower() == "bearer" else b""
        found = None
        for digest, tenant in self._keys:
            if hmac.compare_digest(digest, offered):
                found = Caller(tenant, self._admin is None and len(self._keys) == 1, urgent=tenant in self._urgent)
        if self._metrics is not None and hmac.compare_digest(self._metrics, offered):
            return Caller(metrics=True)
        if self._admin is not None and hmac.compare_digest(self._admin[0], offered):
            return Caller(self._admin[1] if self._keys else "", admin=True)
        if self._keys:
            return found
        return Caller(admin=self._admin is None)

    def salt(self, caller: Caller, cache_salt: str | None) -> str:
        """Under which KV is shared: the key's owner and a digest of the client's salt, neither can reach into the other."""
        own = _digest(cache_salt).hex()[:32] if cache_salt else ""
        return f"{caller.tenant}/{own}" if caller.tenant or own else ""

    def usage(self, caller: Caller) -> Usage:
        return self._usage.setdefault(caller.tenant, Usage())  # callers come from `identify`: one per key

    def count(self, caller: Caller, prompt: int, generated: int, cached: CachedTokens) -> None:
        """Account for a request."""
        usage = self.usage(caller)
        usage.requests += 1
        usage.prompt_tokens += prompt
        usage.generated_tokens += generated
        usage.device += cached.device
        usage.host += cached.host
        usage.disk += cached.disk


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _slow_id(key: str) -> str:
    return hashlib.scrypt(key.encode(), salt=b"afterglow tenant", n=2**12, r=8, p=1, dklen=16).hex()
