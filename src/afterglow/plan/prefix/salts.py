"""The names under which rows lie: whose they are, and what of theirs.

    ""                       rows of requests without an API key and without a `cache_salt`
    TENANT.SALT              a tenant's, under one of its salts; either part may be empty
    TENANT.SALT~EPOCH        what survived a truncation there (see `truncation`)
    TENANT.SALT~approximate  rows that were computed over a selection of the rows before them (SPEC); they go on from rows there

Both parts are digests: no key and no secret of a client is in them. The tenant is named apart, so that quotas, pins and a
tenant's reset find all that is its own, over restarts too. A salt without a dot is its own tenant (a library's).
"""

from __future__ import annotations

import hashlib

from afterglow.plan.step import Kind

_APPROXIMATE = "~approximate"


def salt_name(salt: str) -> str:
    """Return the name of a salt as callers write it: TENANT/SALT, or a SALT that is a tenant by itself."""
    tenant, slash, own = salt.partition("/")
    return f"{_digest(tenant)}.{_digest(own)}" if slash else _digest(salt)


def earlier_name(salt: str) -> str:
    """Return the name that a salt had before tenants were named apart; no lookup uses it any more."""
    return _digest(salt)


def everything_of(tenant: str) -> str:
    """Return the value for `covers` that means all rows of one tenant, as callers write the tenant."""
    return f"{_digest(tenant)}.*"


def approximate(salt: str) -> str:
    """Return the salt of the approximate rows that go on from rows under a client's salt."""
    return salt + _APPROXIMATE


def is_approximate(salt: str) -> bool:
    """Tell whether rows under this salt were computed over a selection of the rows before them."""
    return salt.endswith(_APPROXIMATE)


def is_private(salt: str) -> bool:
    """Do rows under this salt depend on more than the tokens before them?"""
    return "~" in salt


def kind_of(salt: str) -> Kind:
    """Return what extents under a salt are."""
    return "approx" if is_approximate(salt) else "session" if is_private(salt) else "exact"


def client_salt(salt: str) -> str:
    """Return the salt that requests bring for a salt under which rows lie."""
    return salt.partition("~")[0]


def tenant_of(salt: str) -> str:
    """Return the tenant whose rows lie under a salt."""
    return client_salt(salt).partition(".")[0]


def covers(whose: str | None, salt: str) -> bool:
    """Do rows under `salt` belong to `whose`: one salt, `everything_of` a tenant, or all (None)?"""
    if whose is None:
        return True
    return tenant_of(salt) == whose[:-2] if whose.endswith(".*") else client_salt(salt) == whose


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32] if text else ""
