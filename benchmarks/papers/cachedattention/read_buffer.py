"""How many layers to load before a job starts (CachedAttention §3.2.1): by the printed formula, by the exact one, and step by step."""

from __future__ import annotations

import math


def read_buffer_layers(layers: int, load: float, compute: float, *, exact: bool = True) -> int:
    """Layers that must be loaded before a job starts, so that it never waits. `load` and `compute` are per layer.

    The paper's formula (§3.2.1) is one layer's compute short; `exact` adds it. At least one layer, because the first
    cannot be loaded while nothing is computed.
    """
    if load <= 0:
        return 0
    lead = layers * load - (layers - 1 if exact else layers) * compute
    return min(layers, max(1, math.ceil(lead / load - 1e-9)))


def stall(layers: int, load: float, compute: float, buffered: int) -> float:
    """Seconds that a job of `layers` layers waits in all, if `buffered` layers are there when it starts and the load
    goes on (step by step, without a formula)."""
    clock = waited = 0.0
    for layer in range(layers):
        ready = (layer + 1 - buffered) * load
        waited += max(0.0, ready - clock)
        clock = max(clock, ready) + compute
    return waited
