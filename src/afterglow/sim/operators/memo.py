"""AttnCache on paper: self-attention whose maps are looked up rather than computed.

A sentence whose maps are found takes values, weighted sums and the output projection; queries, keys, rotation, scores and
softmax fall away. With a hit rate h a layer takes (1-h) full + h hit, and every sentence a projection and a search
(AttnCache, 3 and Algorithm 2). Times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from afterglow.errors import ConfigError
from afterglow.sim.machine.catalogue import GIB, Hardware
from afterglow.sim.machine.shape import ModelShape

# The paper's machine. `flops` is what its matrices reach with int8 weights: an assumption, no time being printed; the
# bandwidth is that of two sockets of eight DDR5-4000 channels.
XEONS = Hardware(
    name="2 Xeon 4410Y",
    kind="cpu",
    memory_bytes=512 * GIB,
    flops=4e12,
    memory_bandwidth=512e9,
    host_link_bandwidth=256e9,
    source="AttnCache 4.1; flops assumed",
)
OPERATOR_S = {"cpu": 41e-6, "gpu": 8e-6}  # an operator besides matrices; cpu: fitted to LazyFormer's 1.39 on LLaMA-2-7B
FULL_OPERATORS = 16
HIT_OPERATORS = 5  # what Algorithm 2 leaves: value and output projection, sums, transposition, fetch
SEARCH_S = 0.5e-3  # at most, of 100K vectors (4.1)
SENTENCE = 32  # tokens, as in Figure 1
HIT_RATE = 0.3  # at a threshold of 0.99 (5.2)


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Self-attention of one layer, seconds: computed, and with a map at hand."""

    full: float
    hit: float

    @property
    def saved(self) -> float:
        """The share that a hit saves."""
        return 1 - self.hit / self.full


def layer_times(model: ModelShape, hardware: Hardware, tokens: int) -> LayerTimes:
    """Compute the times for one sentence of `tokens` tokens, with weights of one byte. Raises: ConfigError."""
    if tokens < 1:
        raise ConfigError(f"a sentence has 1 token or more, got {tokens}")
    query = model.hidden * model.heads * model.head_dim  # weights of the queries, as many as of the output
    key = model.hidden * model.kv_heads * model.head_dim  # of the keys, as many as of the values
    pairs = 2 * tokens * tokens * model.heads * model.head_dim  # operations of scores, or of sums

    def matrices(weights: int) -> float:
        return max(2 * tokens * weights / hardware.flops, weights / hardware.memory_bandwidth)

    each = OPERATOR_S[hardware.kind]
    full = matrices(2 * query + 2 * key) + 2 * pairs / hardware.flops + FULL_OPERATORS * each
    maps = map_bytes(model, tokens) / model.layers / hardware.memory_bandwidth
    return LayerTimes(full, matrices(query + key) + pairs / hardware.flops + maps + HIT_OPERATORS * each)


def map_bytes(model: ModelShape, tokens: int) -> int:
    """Of one sentence's maps in half precision, over all layers."""
    return 2 * model.layers * model.heads * tokens * tokens


def projection_seconds(model: ModelShape, hardware: Hardware, tokens: int, search: float = SEARCH_S) -> float:
    """A sentence's feature vector (16 positions of 256, to 128, to 128) and the search for its nearest."""
    pooling = 4 * tokens * model.hidden / hardware.memory_bandwidth
    return search + pooling + 2 * (16 * 256 * 128 + 128 * 128) / hardware.flops + 3 * OPERATOR_S[hardware.kind]


def speedup(times: LayerTimes, layers: int, hit_rate: float, projection: float = 0.0) -> float:
    """Compute the speed-up of self-attention over all sentences, misses included; `projection`: seconds once per sentence.
    Raises: ConfigError."""
    if not 0 <= hit_rate <= 1:
        raise ConfigError(f"the hit rate must be between 0 and 1, got {hit_rate}")
    mixed = (1 - hit_rate) * times.full + hit_rate * times.hit + projection / layers
    return times.full / mixed


def end_to_end(model: ModelShape, hardware: Hardware, tokens: int, hit_rate: float, projection: float = 0.0) -> float:
    """Speedup of whole layers, feed-forward networks included."""
    times = layer_times(model, hardware, tokens)
    weights = model.hidden * model.ffn * (3 if model.gated_mlp else 2)
    rest = max(2 * tokens * weights / hardware.flops, weights / hardware.memory_bandwidth)
    saved = hit_rate * (times.full - times.hit) - projection / model.layers
    return (times.full + rest) / (times.full + rest - saved)
