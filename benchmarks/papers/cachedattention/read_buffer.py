"""What a read buffer saves (CachedAttention §3.2.1), step by step."""

from __future__ import annotations


def stall(layers: int, load: float, compute: float, buffered: int) -> float:
    """Seconds that a job of `layers` layers waits in all, if `buffered` layers are there when it starts and the load
    goes on (step by step, without a formula)."""
    clock = waited = 0.0
    for layer in range(layers):
        ready = (layer + 1 - buffered) * load
        waited += max(0.0, ready - clock)
        clock = max(clock, ready) + compute
    return waited
