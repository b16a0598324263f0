"""The room for a cache: on its file system, and beside other caches in the same cache directory, of other models, or of the same with
other number formats.

A disk budget is one namespace's. The files of another model are never removed for it, because they may be wanted again
tomorrow; but the log warns the operator, who has set the budget.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import threading
from pathlib import Path

from afterglow.config import format_size
from afterglow.store.namespace.namespace import holder, is_namespace
from afterglow.store.places import bytes_below

log = logging.getLogger("afterglow.store")


def others(path: Path) -> list[Path]:
    """List the namespaces beside the one in the folder `path`, by name."""
    return [other for other in sorted(path.parent.iterdir()) if other != path and is_namespace(other)]


def excess(path: Path, budget: int) -> str | None:
    """Return a warning if the namespace in the folder `path` and those that no process holds take more than `budget` bytes."""
    # A server that runs has a budget of its own.
    found = [(bytes_below(other), other) for other in others(path) if holder(other) is None]
    beside = sorted(found, key=lambda each: -each[0])
    total = bytes_below(path) + sum(size for size, _ in beside)
    if not beside or total <= budget:
        return None
    names = ", ".join(f"{other.name} ({format_size(size)})" for size, other in beside)
    remedy = f"afterglow cache clear {beside[0][1].name} --cache-dir {shlex.quote(str(path.parent))}"
    return (
        f"{path.parent} takes {format_size(total)}, more than --disk-cache {format_size(budget)}, which is for one model in"
        f" one number format only. Nobody uses {names}. To remove the largest: {remedy}"
    )


def lack(path: Path, budget: int, free: int) -> str | None:
    """Return a warning if the namespace in the folder `path` cannot grow to `budget` bytes, where `free` are left."""
    room = bytes_below(path) + free
    if budget <= room:
        return None
    return (
        f"--disk-cache {format_size(budget)} is more than the {format_size(room)} that the file system of {path.parent} has for it; when "
        "that is full, no more rows are saved there"
    )


def warn(path: Path, budget: int) -> threading.Thread | None:
    """Log the warnings of `lack` and `excess`, in a thread: a large cache has files beyond number. None: there is nothing to count."""

    def work() -> None:
        try:
            for said in (lack(path, budget, free), excess(path, budget)):
                if said is not None:
                    log.warning("%s", said)
        except OSError as error:  # a look around is not worth more than a line
            log.info("what else is in %s cannot be counted: %s", path.parent, error.strerror)

    try:
        free = shutil.disk_usage(path).free
        if budget <= free and not others(path):
            return None
    except OSError:
        return None
    thread = threading.Thread(target=work, name="afterglow-neighbours", daemon=True)
    thread.start()
    return thread
