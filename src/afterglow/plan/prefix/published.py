"""How extents are named where several engines find them: an extent's name says all that its reader has to know of it.

An extent is listed under the beginning that leads to it: a digest of its tenant's salt and of all tokens up to and with the first one that
it adds to its engine's tree. A reader that knows a prompt's first n rows lists what its first n + 1 tokens lead to. In most trees that
is one extent, however many conversations begin alike.
"""

from __future__ import annotations

import hashlib
import re
from math import ceil, inf
from typing import Final, NamedTuple

from afterglow.plan.step import ExtentId

MIN_LOOKUP_ROWS: Final = 64  # that a lookup may bring: fewer are computed sooner

_NAME: Final = re.compile(r"([0-9a-f]{40})-(\d{1,9})-(\d{1,6})-(\d{1,12})")


class Published(NamedTuple):
    """An extent as others find it: rows [first_row, first_row + rows) of a conversation. `expires`: seconds since 1970; 0: never."""

    id: ExtentId
    first_row: int
    rows: int
    expires: int = 0

    def __str__(self) -> str:
        return f"{self.id}-{self.first_row}-{self.rows}-{self.expires}"

    @classmethod
    def parse(cls, name: str) -> Published | None:
        """Read a name; None: it is none."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        first_row, rows, expires = (int(each) for each in found.groups()[1:])
        return cls(found[1], first_row, rows, expires) if rows else None

    @property
    def end(self) -> int:
        """Return the number of rows up to its last one."""
        return self.first_row + self.rows

    def lives(self, now: float) -> bool:
        """Has it not expired? `now`: seconds since 1970."""
        return not self.expires or now < self.expires


def listed_under(salt: str, tokens: bytes) -> str:
    """Digest the tokens up to and with the first one that is looked for, keyed by the salt: 40 hexadecimal digits."""
    key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
    return hashlib.blake2b(tokens, digest_size=20, key=key, person=b"afterglow edge").hexdigest()


def expiry(seconds: float) -> int:
    """Turn the time at which an extent expires into a name's."""
    return 0 if seconds == inf else max(1, ceil(seconds))
