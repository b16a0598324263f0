"""What commands show and read: progress bars on standard error, what a reply cost, and texts of files and standard input, in UTF-8."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from afterglow.errors import ConfigError
from afterglow.request import CachedTokens

Report = Callable[[str, int, int], None]  # what, done, total


class ReaderGone(Exception):
    """What reads standard output (head, less) has gone. No OSError: typer has an end of its own for such."""


def complete_streams() -> None:
    """Put nothing in the place of standard streams that are closed, and let a locale without a character show it as an escape."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def give_up_output() -> None:
    """Let Python not complain about standard output when it flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def progress() -> Iterator[Report]:
    """Yield a function to report long work to: one bar for each name of work, removed when all is done."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report


def summary(prompt_tokens: int, cached: CachedTokens, ttft_s: float | None) -> str:
    """Summarise a prompt: `812 prompt tokens, 768 cached (device 512, host 256), first token after 35 ms`."""
    tiers = (("device", cached.device), ("host", cached.host), ("disk", cached.disk), ("shared", cached.shared))
    found = ", ".join(f"{name} {count}" for name, count in tiers if count)
    line = f"{prompt_tokens} prompt tokens, {cached.total} cached{f' ({found})' if found else ''}"
    return line if ttft_s is None else f"{line}, first token after {ttft_s * 1e3:.0f} ms"


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
