"""API keys: a key is a tenant, with caches of its own. Some keys may see and change those of all tenants.

The name of a tenant is derived from its key and is a part of every salt that reaches the engine. So two keys never
share rows, whatever clients send as `cache_salt`, over restarts as well.

A request's record names its tenant, and has its numbers.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from afterglow.errors import RequestError
from afterglow.request import CachedTokens


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. `tenant` identifies the API key without being it; empty where there are no keys."""

    tenant: str = ""
    admin: bool = False
    metrics: bool = False  # may see metrics only
    urgent: bool = False  # its requests may go before others'

    def check_metrics(self) -> None:
        """Refuse callers that may not see metrics. Raises: RequestError."""
        if not self.metrics:
            self.check_admin()

    def check_priority(self, priority: int) -> None:
        """Refuse a priority before others, unless the caller's key allows it. Raises: RequestError."""
        if priority < 0 and not (self.admin or self.urgent):
            raise RequestError(
                f"priority {priority} goes before the requests of others, which this key may not; use 0 or more, or ask the"
                " operator for --urgent-key",
                status=403,
                param="priority",
                code="priority_not_allowed",
            )

    def check_admin(self) -> None:
        """Refuse callers that may not manage all tenants. Raises: RequestError."""
        if not self.admin:
            raise RequestError(
                "this shows or changes what belongs to all tenants; it needs the key that --admin-key gives",
                status=403,
                code="admin_key_required",
            )


@dataclass(slots=True)
class TenantUsage:
    """The requests and tokens of a tenant since the server's start."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached: CachedTokens = CachedTokens()


class Tenants:
    """Maps API keys to tenants and rights.

    All tenants are managed with the admin key; without one, with the only API key; without any key, by every caller.
    With several API keys and no admin key, no caller may manage them all.
    """

    def __init__(
        self,
        keys: Sequence[str],
        admin_key: str | None = None,
        metrics_key: str | None = None,
        urgent: Sequence[str] = (),
    ) -> None:
        """Hash the keys. `urgent`: keys whose requests may go before others'."""
        # A slow hash, once per key: the identifier ends up in cache ids, and must not reveal the key.
        self._keys = [(_digest(key), _slow_id(key)) for key in dict.fromkeys(keys)]
        self._admin = (_digest(admin_key), _slow_id(admin_key)) if admin_key else None
        self._metrics = _digest(metrics_key) if metrics_key else None
        self._urgent = {_slow_id(key) for key in urgent}
        self._usage: dict[str, TenantUsage] = {}

    @property
    def only_key(self) -> bool:
        """Does a single API key manage all tenants, without an admin key?"""
        return self._admin is None and len(self._keys) == 1

    def identify(self, authorization: str) -> Caller | None:
        """Find the owner of an Authorization header; None for a wrong key. All keys are compared, in constant time."""
        scheme, _, key = authorization.partition(" ")
        offered = _digest(key.strip()) if scheme.lower() == "bearer" else b""
        found = None
        for digest, tenant in self._keys:
            if hmac.compare_digest(digest, offered):
                found = Caller(tenant, self.only_key, urgent=tenant in self._urgent)
        if self._metrics is not None and hmac.compare_digest(self._metrics, offered):
            return Caller(metrics=True)
        if self._admin is not None and hmac.compare_digest(self._admin[0], offered):
            return Caller(self._admin[1] if self._keys else "", admin=True)
        if self._keys:
            return found
        return Caller(admin=self._admin is None)

    def salt(self, caller: Caller, cache_salt: str | None) -> str:
        """Derive the salt under which KV is shared, from the caller's key and the client's own salt. Neither can forge
        the other's part."""
        own = _digest(cache_salt).hex()[:32] if cache_salt else ""
        return f"{caller.tenant}/{own}" if caller.tenant or own else ""

    def usage(self, caller: Caller) -> TenantUsage:
        """Return a tenant's numbers so far."""
        return self._usage.setdefault(caller.tenant, TenantUsage())  # callers come from `identify`: one per key

    def count(self, caller: Caller, prompt: int, generated: int, cached: CachedTokens) -> None:
        """Add a finished request to its tenant's numbers."""
        usage = self.usage(caller)
        usage.requests += 1
        usage.prompt_tokens += prompt
        usage.generated_tokens += generated
        usage.cached += cached


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _slow_id(key: str) -> str:
    return hashlib.scrypt(key.encode(), salt=b"afterglow tenant", n=2**12, r=8, p=1, dklen=16).hex()


@dataclass(slots=True)
class RequestRecord:
    """The numbers of one HTTP request, for its line in the log and for the metrics."""

    began: float = field(default_factory=time.perf_counter)
    request_id: str = ""
    caller: Caller = field(default_factory=Caller)
    prompt_tokens: int | None = None  # None: the request generates no tokens
    cached: CachedTokens = field(default_factory=CachedTokens)
    generated: int = 0
    ttft: float | None = None
    last_token: float = 0.0
    per_token: list[float] = field(
        default_factory=list
    )  # a number per reply: mean seconds of its tokens after the first
    note: str = ""  # for the log
    large: bool = False  # the body was parsed in the other process
