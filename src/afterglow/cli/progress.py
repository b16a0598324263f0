"""What a terminal shows of long work: progress bars on standard error, and what a reply cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from afterglow.request import CachedTokens

Report = Callable[[str, int, int], None]  # what, done, total


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
