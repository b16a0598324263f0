"""Sizes of the read buffer and of the write buffer, from times (CachedAttention §3.2).

The papers' buffers are in device memory; here the read buffer is layers of the next job's rows that are read from disk before its turn
comes, or come to the device from host (`batching.read_ahead`), and the write buffer is new rows that wait to be saved.
"""

from __future__ import annotations

import math


def read_buffer_layers(layers: int, load: float, compute: float, *, exact: bool = True) -> int:
    """Compute how many layers must be loaded before a job starts, so that it never waits. `load` and `compute`: seconds per layer.

    The paper's formula (§3.2.1), T_load L_hist - T_pref L_new in layers, is one layer's compute short; `exact` adds it. At least
    one layer, because the first cannot be loaded while nothing is computed.
    """
    if load <= 0:
        return 0
    lead = layers * load - (layers - 1 if exact else layers) * compute
    return min(layers, max(1, math.ceil(lead / load - 1e-9)))


def write_buffer_bytes(size: int, rate: float, computing: float) -> int:
    """Compute how many of `size` bytes of new rows are not saved yet, at `rate` bytes/s, when a job has computed for `computing`
    seconds since its first layer: B max(0, T_save L_total - (T_prefill_tail + T_decode)) (§3.2.2)."""
    return max(0, math.ceil(size - rate * computing))
