"""Registered prefixes as the index sees them: whose rows lie in a tree of their own, and who may read there.

RelayAttention keeps the KV of a system prompt once, apart from the requests'; here it lies under the salt of
its registrant. The operator's is for all tenants (a share group), a tenant's for the tenant alone.

    operator   (system prompt, 0, 300)                       rows of the registered tokens, and nothing else
                        :            :
    tenant a            + (A, 0, 90) :                       a tree per salt and prefix: the tenant's own rows
    tenant b                         + (B, 0, 120)

Only tokens that begin with *all* of a registered prefix lead into its tree: if parts were enough, a tenant could find
out token by token what the operator's prompt says. Below it everyone is alone, as ever.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from afterglow.plan.prefix.salts import client_salt

OPERATOR = "operator"  # whose salt this is; tenants' are hexadecimal digests, or empty


@dataclass(frozen=True)
class SharedPrefix:
    """Tokens (uint32, little-endian) whose rows lie under a salt, for all tenants that may read them."""

    salt: str
    tokens: bytes

    @property
    def rows(self) -> int:
        return len(self.tokens) // 4

    @cached_property
    def digest(self) -> str:
        return prefix_digest(self.tokens)


def prefix_digest(tokens: bytes) -> str:
    """Return the digest by which trees below a prefix are found, registered or not, by any tenant."""
    return hashlib.blake2b(tokens, digest_size=16).hexdigest()


def may_read(salt: str, other: str) -> bool:
    """May rows under `salt` hang below rows that lie under another salt?"""
    return salt != other and other in (OPERATOR, client_salt(salt))


def tree_below(salt: str, digest: str) -> str:
    """Return the name of the tree with a salt's own rows below a prefix."""
    return f"{salt}|{digest}"


def salt_of(tree: str) -> str:
    """Return the salt whose rows are in a tree."""
    return tree.partition("|")[0]


class SharedPrefixes:
    """All registered prefixes, by salt. The same one may be registered more than once."""

    def __init__(self) -> None:
        self.version = 0  # changes with those of the operator, whose rows the exact rows of all tenants hang below
        self._counts: dict[SharedPrefix, int] = {}
        self._by_salt: dict[str, list[SharedPrefix]] = {}  # the longest first

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __contains__(self, prefix: SharedPrefix) -> bool:
        return prefix in self._counts

    def add(self, prefix: SharedPrefix) -> None:
        self._counts[prefix] = self._counts.get(prefix, 0) + 1
        own = self._by_salt.setdefault(prefix.salt, [])
        if prefix not in own:
            self.version += prefix.salt == OPERATOR
            own.append(prefix)
            own.sort(key=lambda each: -each.rows)

    def remove(self, prefix: SharedPrefix) -> None:
        """Undo one `add` of a prefix."""
        self._counts[prefix] -= 1
        if not self._counts[prefix]:
            self.version += prefix.salt == OPERATOR
            del self._counts[prefix]
            self._by_salt[prefix.salt].remove(prefix)
            if not self._by_salt[prefix.salt]:
                del self._by_salt[prefix.salt]

    def of(self, salt: str) -> list[SharedPrefix]:
        """List the prefixes that requests under a salt may begin with."""
        salts = dict.fromkeys((OPERATOR, client_salt(salt)))
        return [prefix for other in salts for prefix in self._by_salt.get(other, ())]

    def before(self, salt: str, tokens: bytes | bytearray) -> SharedPrefix | None:
        """Find the longest registered prefix of `tokens` whose rows lie in another salt's tree that this salt may read."""
        if not self._by_salt:
            return None
        found: SharedPrefix | None = None
        for other in dict.fromkeys((OPERATOR, client_salt(salt))):
            if other == salt:
                continue
            for prefix in self._by_salt.get(other, ()):
                if found is not None and prefix.rows <= found.rows:
                    break
                if tokens.startswith(prefix.tokens):
                    found = prefix
                    break
        return found
