"""An engine in a temporary folder."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.store.extents.throttle import Throttle


@contextlib.contextmanager
def engine_of(
    model: str, *, threads: int | None = None, throttle: Throttle | None = None, cache: dict[str, Any], **config: Any
) -> Iterator[Engine]:
    """Make an engine whose disk tier is a temporary folder. It guesses no tokens unless told to: replies of random weights go
    round in circles, which guesses would follow."""
    with tempfile.TemporaryDirectory(prefix="afterglow-bench-") as folder:
        settings = CacheConfig(**{"cache_dir": Path(folder), "warm_start": False, **cache})
        whole = {"speculate": "off", **config}
        engine = Engine.load(model, EngineConfig(cache=settings, threads=threads, **whole), throttle=throttle)
        engine.start()
        try:
            yield engine
        finally:
            engine.close(flush=False)
            del engine
            gc.collect()  # a benchmark may have tied it into a circle
