"""`afterglow` with a fault under its cache directory: `python -m tests.faults.faulty_server FAULT FOLDER serve ...`."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path

from tests.faults.syscalls import Rule, Syscalls, error, kill_half_way, slow

TIMEOUT = 1.0  # the server's own is half a minute
STUCK = 4.0  # seconds for which a hanging read hangs

RULES: dict[str, Callable[[], Rule]] = {
    "none": lambda: Rule([], error(0)),
    "full": lambda: Rule(["pwritev"], error(errno.ENOSPC), lambda call: call.extent),
    "hang": lambda: Rule(["preadv"], slow(STUCK), lambda call: call.extent, limit=1),
    "kill": lambda: Rule(["pwritev"], kill_half_way, lambda call: call.extent, skip=4),
}


def main(fault: str, folder: str, *arguments: str) -> None:
    from afterglow import cli
    from afterglow.cli.environment import set_up_threads

    set_up_threads(1)
    if fault == "hang":
        from afterglow.engine import setup

        setup.READ_TIMEOUT = TIMEOUT
    with Syscalls(Path(folder)) as calls:
        calls.add(RULES[fault]())
        sys.argv = ["afterglow", *arguments]
        cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
