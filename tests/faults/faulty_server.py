"""`afterglow` with a fault under its cache directory: `python -m tests.faults.faulty_server FAULT FOLDER serve ...`."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tests.faults.syscalls import ALL, Rule, Syscalls, error, kill_half_way, slow

TIMEOUT = 1.0  # the server's own is half a minute
STUCK = 4.0  # seconds for which a hanging read hangs
DEAD = 30.0  # and each call of whatever kind, of a disk that is dead
SWITCH = ".dead"  # added to the folder's name; a disk is dead while there is such a file

RULES: dict[str, Callable[[str], Rule]] = {
    "none": lambda folder: Rule([], error(0)),
    "full": lambda folder: Rule(["pwritev"], error(errno.ENOSPC), lambda call: call.extent),
    "hang": lambda folder: Rule(["preadv"], slow(STUCK), lambda call: call.extent, limit=1),
    "kill": lambda folder: Rule(["pwritev"], kill_half_way, lambda call: call.extent, skip=4),
    # `access` is not among the calls that are looked at
    "dead": lambda folder: Rule(ALL, slow(DEAD), lambda call: os.access(folder + SWITCH, os.F_OK)),
}


def main(fault: str, folder: str, *arguments: str) -> None:
    from afterglow import cli
    from afterglow.library.threads import set_up_threads

    set_up_threads(1)
    if fault == "hang":
        from afterglow.engine import setup

        setup.READ_TIMEOUT = TIMEOUT
    with Syscalls(Path(folder)) as calls:
        calls.add(RULES[fault](folder))
        sys.argv = ["afterglow", *arguments]
        cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
