"""Whether a database of attention maps is used. Light to import: the command line builds its flags from it."""

from __future__ import annotations

from typing import Literal, get_args

from afterglow.errors import ConfigError

MemoMode = Literal["auto", "on", "off"]


def check_memo_mode(mode: str) -> None:
    """Raises ConfigError."""
    if mode not in get_args(MemoMode):
        raise ConfigError(f"--memo-mode must be one of {', '.join(get_args(MemoMode))}, got {mode!r}")
