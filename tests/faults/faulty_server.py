"""`afterglow` with a fault under its cache directory: `python -m tests.faults.faulty_server FAULT FOLDER serve ...`."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.syscalls import ALL, Act, Call, Rule, Syscalls, error, kill_half_way, slow

TIMEOUT = 1.0  # the server's own is half a minute
STUCK = 4.0  # seconds for which a hanging read hangs
SWITCH = (
    ".dead"  # added to the folder's name; a disk is dead while there is such a file: no call of whatever kind returns
)


def while_there(switch: str) -> Act:
    """No call returns while there is such a file."""

    def act(call: Call) -> Any:
        while os.access(switch, os.F_OK):  # not among the calls that are looked at
            time.sleep(0.05)
        return call()

    return act


RULES: dict[str, Callable[[str], Rule]] = {
    "none": lambda folder: Rule([], error(0)),
    "full": lambda folder: Rule(["pwritev"], error(errno.ENOSPC), lambda call: call.extent),
    "hang": lambda folder: Rule(["preadv"], slow(STUCK), lambda call: call.extent, limit=1),
    "kill": lambda folder: Rule(["pwritev"], kill_half_way, lambda call: call.extent, skip=4),
    "dead": lambda folder: Rule(ALL, while_there(folder + SWITCH)),
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
