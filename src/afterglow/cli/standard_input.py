"""Standard input as UTF-8."""

from __future__ import annotations

import io
import sys
from typing import TextIO

from afterglow.errors import ConfigError


def utf8_stdin() -> TextIO:
    """Return standard input as UTF-8, for any locale. Reading other bytes raises UnicodeDecodeError."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    return sys.stdin


def not_utf8(error: UnicodeDecodeError) -> ConfigError:
    """Make the error for standard input that is not UTF-8."""
    byte = error.object[error.start]
    return ConfigError(f"standard input is not UTF-8 text: it has a byte 0x{byte:02x}; convert it first, as iconv does")
