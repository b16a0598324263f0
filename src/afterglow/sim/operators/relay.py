"""RelayAttention on paper: a roofline of each attention operator of one decoding step.

A batch of requests begins with the same system prompt. Plain attention reads the system prompt's keys and values once per
request, relay attention once per batch, and then joins what it found with what each request's own context gives
(RelayAttention, ACL 2024, Algorithm 1 and 3.4). Times in seconds, sizes in bytes, lengths in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from afterglow.errors import ConfigError
from afterglow.sim.machine.catalogue import Hardware
from afterglow.sim.machine.shape import ModelShape

Mode = Literal["plain", "shared", "relay"]
MODES: tuple[Mode, ...] = get_args(Mode)

HALF = 2  # bytes of a number
# Two constants, fitted to the eighteen points of Figure 1 (A40): the slope of its curves gives the first, their values
# at no tokens the second.
BANDWIDTH_EFFICIENCY = 0.967
LAUNCH_S = 8e-6


def printed_speedup(batch: float, context: float, system: float) -> float:
    """Equation 10: elements moved without relay over those moved with it, keys and values counted as one."""
    return (system + context + 2) / (system / batch + context + 7)


def speedup(batch: float, context: float, system: float, group: float = 1) -> float:
    """Equation 10 with keys and values counted each, `group` query heads to a key/value head (1: no sharing)."""
    return (system + context + group) / (system / batch + context + 3.5 * group)


@dataclass(frozen=True, slots=True)
class Roof:
    """What one device, or several that share a model evenly, reach: bytes/s, operations/s, seconds per launched operator."""

    bandwidth: float
    flops: float
    launch: float = LAUNCH_S

    @classmethod
    def of(
        cls,
        device: Hardware,
        devices: int = 1,
        peak: Literal["printed", "matrix"] = "printed",
        launch: float = LAUNCH_S,
    ) -> Roof:
        """`peak`: the paper's Table 2 counts what a device computes outside of its matrix units; FlashAttention computes
        inside. Up to batches of 50 neither is reached."""
        flops = device.vector_flops if peak == "printed" and device.vector_flops else device.flops
        return cls(devices * device.memory_bandwidth * BANDWIDTH_EFFICIENCY, devices * flops, launch)

    def seconds(self, size: float, flops: float) -> float:
        """One operator, launched on its own: moving and computing overlap (Equation 1)."""
        return self.launch + max(size / self.bandwidth, flops / self.flops)


@dataclass(frozen=True, slots=True)
class Heads:
    """One attention layer's: query heads, key/value heads, numbers in each."""

    query: int
    kv: int
    dim: int

    @classmethod
    def of(cls, model: ModelShape) -> Heads:
        return cls(model.heads, model.kv_heads, model.head_dim)

    @property
    def query_bytes(self) -> int:
        """Of one token's queries, or of its output."""
        return self.query * self.dim * HALF

    @property
    def kv_bytes(self) -> int:
        """Of one token's keys and values."""
        return 2 * self.kv * self.dim * HALF

    def flops(self, pairs: float) -> float:
        """Scores and weighted sums of so many pairs of a query's token and a cached one."""
        return 4 * self.query * self.dim * pairs


def attention_bytes(mode: Mode, heads: Heads, batch: int, context: float, system: int) -> float:
    """Bytes that one layer's decoding step moves, writing the new token's keys and values aside."""
    rows = batch * heads.query_bytes  # queries, or outputs
    if mode != "relay":
        return 2 * rows + batch * (system + context) * heads.kv_bytes
    return 2 * rows + system * heads.kv_bytes + 2 * rows + batch * context * heads.kv_bytes + 3 * rows


def attention_seconds(mode: Mode, heads: Heads, roof: Roof, batch: int, context: float, system: int) -> float:
    """One layer's attention of a decoding step: `batch` requests, each with `context` tokens of its own (a mean) after
    `system` common ones. Includes writing the new token's keys and values to the cache, as the paper's measurements do.

    `shared`: the system prompt is kept once, but read once per request; as slow as `plain`.
    """
    rows, own = batch * heads.query_bytes, batch * context
    write = roof.seconds(2 * batch * heads.kv_bytes, 0)
    if mode != "relay" or not system:
        pairs = own + batch * system
        return write + roof.seconds(2 * rows + pairs * heads.kv_bytes, heads.flops(pairs))
    return (
        write
        + roof.seconds(2 * rows + system * heads.kv_bytes, heads.flops(batch * system))
        + roof.seconds(2 * rows + own * heads.kv_bytes, heads.flops(own))
        + roof.seconds(3 * rows, 0)
    )


def checked(batch: int, context: float, system: int) -> None:
    """Check sizes of a batch. Raises: ConfigError."""
    if batch < 1:
        raise ConfigError(f"the batch must be at least 1, got {batch}")
    if context < 0 or system < 0:
        raise ConfigError(f"lengths must be 0 or more tokens, got {context} and {system}")
