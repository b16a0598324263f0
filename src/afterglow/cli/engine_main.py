"""The process of an engine that `afterglow serve` starts beside its own: `python -m afterglow.cli.engine_main HANDLE`."""

from __future__ import annotations

import gc
import os
import signal
import sys

from afterglow.cli.serve import FoundModel, load_here
from afterglow.errors import UserError
from afterglow.library.threads import set_up_threads
from afterglow.server.engine_process.engine_host import EngineHost
from afterglow.server.lifecycle.address import announce
from afterglow.server.lifecycle.service import set_up_logging
from afterglow.text import Tokenizer


def main(handle: int) -> None:
    """Serve by the socket of this number, until the process at its other end is done, or has ended."""
    host = EngineHost(handle)
    found: FoundModel = host.first
    set_up_threads(found.config.threads)
    set_up_logging(found.server.log_level)
    try:
        with load_here(found, Tokenizer(found.folder)) as parts:
            for number in (signal.SIGINT, signal.SIGTERM):  # from now on, that process decides
                signal.signal(number, signal.SIG_IGN)
            announce(parts.engine.conversations.folder, pid=os.getppid())
            gc.collect()
            gc.freeze()  # as the server does: the objects of now stay
            host.serve(parts.engine, parts.tokenizer, parts.embedders)
    except UserError as error:
        host.refuse(error)
    host.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
