"""Host memory made slow on purpose: no real memory is like this, but the line from it to a device may be."""

from __future__ import annotations

import math
import time

from afterglow.engine.engine import Engine
from afterglow.engine.gather import HostRows
from afterglow.plan.step import Gather
from afterglow.store.extents.throttle import Line


class SlowHostRows(HostRows):
    """Host rows that arrive no sooner than a line carries them. On a CPU, where a gather is the calling thread."""

    line = Line(math.inf)

    def ready(self, gather: Gather, layer: int, company: bool = False, *, wait: bool = True) -> bool:
        there = super().ready(gather, layer, company, wait=wait)
        if there:
            self.line.send(2 * (gather.stop - gather.start) * self.row_bytes, time.perf_counter())
        return there


def slow_host(engine: Engine) -> SlowHostRows:
    """Put a line between an engine's host rows and its device; its speed may be changed at any time."""
    gatherer = engine.parts.runner._gatherer
    real = gatherer._host
    slow = SlowHostRows(real.arena, real.store, real.read_timeout, real.device, real.pressed)

    def put() -> None:
        gatherer._host = slow

    engine.ask(put)
    return slow
