"""The process of a fake engine. Its first message: the reply as token ids, and the options."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from afterglow.server.engine_process.engine_host import EngineHost
from afterglow.server.engine_process.far import offer
from afterglow.text import Tokenizer
from tests.server.fake_engine import FakeEngine

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    host = EngineHost(int(sys.argv[1]))
    folder, reply, options = host.first
    engine = FakeEngine(reply, **options)
    engine.start()
    offer("pid", os.getpid)
    host.serve(engine, Tokenizer(Path(folder)), [])
    engine.gate.set()
    engine.close()
    host.close()
