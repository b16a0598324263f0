"""How many layers of an extent are read at a time while other loads wait for the same threads.

All extents of a job are needed layer by layer (CachedAttention §3.2.1, spec A3): read whole, one after another, the first
layer of the last one would come when nearly everything else has come.
"""

from __future__ import annotations

from typing import Final

from afterglow.store.layout import KVLayout

# Measured on bench-100m with two threads: parts of these sizes reach 86-93 % of the bandwidth of whole extents (docs/log.md).
LEAST_BYTES: Final = 256 << 10  # below it a part costs more calls than bytes
MOST_BYTES: Final = 2 << 20
ALONE_BYTES: Final = 32 << 20  # what somebody who comes meanwhile waits for at most
TURNS: Final = 3  # into how many parts an extent is cut that is smaller than all that


def layers_at_once(layout: KVLayout, blocks: int, crowded: bool) -> int:
    """Layers of `blocks` blocks that one read brings, at least one. `crowded`: do others wait to read beside it?"""
    size = 2 * blocks * layout.chunk_bytes
    if not crowded:
        return max(1, ALONE_BYTES // size)
    return max(1, -(-LEAST_BYTES // size), min(-(-layout.layers // TURNS), MOST_BYTES // size))
