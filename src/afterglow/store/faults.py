"""Words for what goes wrong, as counters and completions have them."""

from __future__ import annotations

import errno
import sqlite3

from afterglow.errors import DamageError, RefusedError, SlowError, StoreError


def kind_of(error: BaseException) -> str:
    """Name an error for counters and for `MoveDone.why`: damage, slow, refused, missing, no_space, timeout or io."""
    if isinstance(error, DamageError):
        return "damage"
    if isinstance(error, SlowError):
        return "slow"
    if isinstance(error, RefusedError):
        return "refused"
    cause = error.__cause__ if isinstance(error, StoreError) else error
    if isinstance(cause, sqlite3.OperationalError) and _says_full(cause):
        return "no_space"
    if isinstance(cause, OSError):
        if cause.errno == errno.ENOENT:
            return "missing"
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return "no_space"
    return "timeout" if isinstance(cause, TimeoutError) else "io"


def _says_full(error: sqlite3.OperationalError) -> bool:
    code = getattr(error, "sqlite_errorcode", None)  # only SQLite itself sets it
    return "is full" in str(error) if code is None else code & 0xFF == sqlite3.SQLITE_FULL
