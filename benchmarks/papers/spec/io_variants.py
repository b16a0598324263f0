"""Variants of SPEC's I/O benchmark, and the record of each request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from afterglow.engine.selective import PrefixSelection, SelectiveAttention
from afterglow.importance.chunk_cache import ChunkCache, Place
from afterglow.importance.chunk_loader import ImportanceStats
from afterglow.importance.select import Queries, RowSelector, SelectionRules
from afterglow.importance.speculation import Prior
from afterglow.plan.step import Selectable

LAYERS, HEADS = 8, 32
RETENTION = 0.25
NEW = 32  # tokens that come with a request
RECOMPUTED = 3  # requests that are computed without any cache
RATIO = 10.0  # reading a whole prefix, over computing a request over it


@dataclass(frozen=True)
class Shape:
    """Describe a model of random weights, the prefixes that are asked about, and the shares of their data that chunk caches hold.
    `lengths`: of prefixes, shortest and longest. `rate`: bytes per second of the disk; None: as `RATIO` says. `kv_heads`: None for as many
    as `heads`. `weights`: who writes the model, transformers ("opt"), or in floats or 8 bits."""

    head_dim: int
    ffn: int
    lengths: tuple[int, int]
    device: float
    host: float
    rate: float | None = None
    count: int = 8  # prefixes
    priors: tuple[Prior, ...] = ("prior", "random", "sinks")  # other ways to guess, each with caches of its own
    layers: int = LAYERS
    heads: int = HEADS
    kv_heads: int | None = None
    weights: Literal["opt", "float", "Q8_0"] = "float"
    number_bytes: int = 4  # of a key's or a value's

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def groups(self) -> int:
        """Count the KV heads."""
        return self.kv_heads or self.heads

    @property
    def row_bytes(self) -> int:
        """Count the bytes of a token's keys and values."""
        return self.layers * 2 * self.groups * self.head_dim * self.number_bytes


_PAPER = Shape(head_dim=16, ffn=1408, lengths=(4096, 10240), device=0.175, host=0.56)  # SPEC §V-A
SHAPES = {
    "llama": _PAPER,
    "opt": replace(_PAPER, weights="opt"),
    "wide": Shape(
        head_dim=64,
        ffn=5632,
        lengths=(4096, 8192),
        device=0.05,
        host=0.10,
        rate=5e8,
        count=5,
        priors=("random",),
        weights="Q8_0",
    ),
}

Kind = Literal["recompute", "all", "keys", "probes", "auto"]


@dataclass(frozen=True)
class Variant:
    """`keys`: all keys are read, and important values; `probes`: probe heads' keys first; `auto`: the engine chooses. `renew`: decoded
    tokens after which a reply selects anew; 0: never."""

    name: str
    kind: Kind
    policy: str = "lfu"
    reorder: bool = False
    prior: Prior = "none"
    renew: int = 0


VARIANTS = [
    Variant("recompute", "recompute"),
    Variant("load everything, LRU", "all"),
    Variant("H2O, LRU", "keys", "lru"),
    Variant("H2O, LFU", "keys", "lfu"),
    Variant("+ITF", "probes", "lfu"),
    Variant("+ITF +RO", "probes", "lfu", True),
    Variant("+ITF +RO +SC", "probes", "score", True),
    Variant("+ITF +RO +SC +SP", "probes", "score", True, "cut"),
]
WHOLE, BASE, SPEC = "load everything, LRU", "H2O, LFU", "+ITF +RO +SC +SP"
AGAIN = replace(VARIANTS[-1], name="the same again")


def guessing(prior: Prior) -> Variant:
    """Return SPEC with guesses of another kind."""
    return replace(VARIANTS[-1], name=f"SPEC, guessing by {prior}", prior=prior)


class Traced(SelectiveAttention):
    """Layers find important what a trace says, after the work of finding something out."""

    def __init__(self, real: SelectiveAttention) -> None:
        super().__init__(real.decoder, real.loader, real.rules, real.renew)
        self.sums: list[Tensor] = []

    def begin(self, selectable: tuple[Selectable, ...], retention: float | None, exact: int = 0) -> PrefixSelection:
        selection = super().begin(selectable, retention, exact)
        selection.selector = TracedSelector(self, selection.selector.rules)
        return selection


class TracedSelector(RowSelector):
    """Select by the sums of a trace, after the work of computing sums."""

    def __init__(self, traced: Traced, rules: SelectionRules) -> None:
        super().__init__(traced.probes, rules)
        self._traced = traced

    def probe_sums(self, queries: Queries, keys: Tensor) -> Tensor:
        voted = super().probe_sums(queries, keys)
        return self._traced.sums[queries.layer][: len(voted), : len(keys)]

    def all_sums(self, queries: Queries, keys: Tensor, voted: Tensor) -> Tensor:
        super().all_sums(queries, keys, voted)
        return self._traced.sums[queries.layer][:, : len(keys)]


Way = Literal["select", "load", "split", "recompute"]


@dataclass
class Work:
    """Prefixes, and requests over them in order: (prefix, request number, new tokens)."""

    prefixes: list[list[int]]
    warm: list[tuple[int, int, list[int]]]
    judged: list[tuple[int, int, list[int]]]


@dataclass
class Asked:
    """A variant: its caches, what it has counted, and its requests."""

    variant: Variant
    shelf: ChunkCache
    stats: ImportanceStats = field(default_factory=ImportanceStats)
    times: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)  # seconds of a decoded token, by request
    ways: list[Way] = field(default_factory=list)  # that the engine took
    read_bytes: int = 0
    warm_rows: dict[Place, int] = field(default_factory=dict)

    def judge(self) -> None:
        """From now on it counts."""
        self.stats, self.read_bytes = ImportanceStats(), 0
        self.warm_rows = {**self.shelf.placement.rows}
        self.times.clear()
        self.ways.clear()
        self.waited.clear()
        self.tokens.clear()
