"""Texts from files and from standard input, in UTF-8."""

from __future__ import annotations

import io
import sys
from pathlib import Path
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


def read_text(file: Path | None, invitation: str) -> str:
    """Read a file, or standard input; a terminal shows the invitation first. Raises: ConfigError."""
    if file is not None:
        return read_file(file, str(file))
    if sys.stdin.isatty():
        print(invitation, file=sys.stderr)
    try:
        return utf8_stdin().read()
    except UnicodeDecodeError as error:
        raise not_utf8(error) from None


def read_file(file: Path, name: str) -> str:
    """Read a file, which errors call `name`. Raises: ConfigError."""
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {name}: {error}") from None


def full_lines(text: str) -> list[str]:
    """Split a text at newlines alone, since other marks that end lines for Python are text; leave empty lines out."""
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
