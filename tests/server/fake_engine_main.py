"""The process of a fake engine. Its first message: the reply as token ids, and the options."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from afterglow.server.engine_process import engine_host
from afterglow.server.engine_process.engine_host import EngineHost
from afterglow.server.engine_process.far import offer
from afterglow.text import Tokenizer
from tests.server.fake_engine import FakeEngine


class Unreadable:
    """What can be sent, and not be received."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("no number",)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    host = EngineHost(int(sys.argv[1]))
    folder, reply, options = host.first
    engine_host.LOOK_SECONDS = options.pop("look_seconds", engine_host.LOOK_SECONDS)
    engine = FakeEngine(reply, **options)
    engine.start()
    offer("pid", os.getpid)
    offer("unreadable", Unreadable)
    offer("counting", lambda: iter(range(3)))
    host.serve(engine, Tokenizer(Path(folder)), [])
    engine.gate.set()
    engine.close()
    host.close()
