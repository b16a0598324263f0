"""SPEC on paper: how long the first token takes when a cached prefix comes from device, host memory and disk.

Layer after layer: load the keys of a few probe heads, select the important tokens on the device, load those tokens' keys
and values, compute attention and the feed-forward network; while it computes, load what the next layer is likely to want
(SPEC, IV; it extends IMPRESS, FAST 2025). Three resources: disk, host link, device. Times in seconds, sizes in bytes,
lengths in tokens. All layers are taken to be alike.

The shapes say which bytes have to be loaded; where they lie follows from how often the prefixes are asked for and what the cache
policy goes by. How important tokens lie in a prefix is a property of trained models, and taken from the paper's figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import exp
from typing import Literal, NamedTuple, get_args

from afterglow.errors import ConfigError
from afterglow.sim.machine.catalogue import Hardware
from afterglow.sim.machine.shape import ModelShape

System = Literal["recompute", "as", "as+h2o+lru", "as+h2o+lfu", "+itf", "+ro", "+sc", "+sp"]
SYSTEMS: tuple[System, ...] = get_args(System)
SPEC: System = "+sc"  # what SPEC's evaluation calls "All"; `+sp` adds prefetching, which the paper gives no numbers for

HALF = 2
Policy = Literal["lru", "lfu", "score"]


@dataclass(frozen=True, kw_only=True)
class PrefixWorkload:
    """A data set of prefixes. `data`: bytes of all prefixes' keys and values; `retention`: the share of tokens that are
    important. The rest are properties of models and text, with where they are from:

    `recall`: of a query's important tokens, those that are important on average (Figure 4: over 80 %); `fallback`: layers
    whose probe heads disagree (IV-B: below 20 %); `run`: important tokens come in runs of about so many (fits Figure 5: with
    half of the tokens important nearly all chunks are touched); `packing`: chunks touched without over with reordering (Figure 20);
    `next_layer`: of a layer's important tokens, those of the layer before (the paper leaves the number open);
    `spread`: deviation of how often the prefixes are asked for, as a share of their number (normal; fits the
    ranges of Figures 16 and 17; a wider one takes more from disk).
    """

    prefix: int
    data: int
    query: int = 64
    retention: float = 0.25
    chunk: int = 64
    probes: int = 3
    recall: float = 0.8
    fallback: float = 0.2
    run: float = 16.0
    packing: float = 1.2
    next_layer: float = 0.7
    spread: float = 0.17

    def __post_init__(self) -> None:
        for name in ("prefix", "data", "query", "chunk", "probes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("retention", "recall", "spread"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be more than 0 and at most 1, got {getattr(self, name)}")
        for name in ("fallback", "next_layer"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be between 0 and 1, got {getattr(self, name)}")

    @property
    def touched(self) -> float:
        """The share of chunks with at least one important token, in the order of the text."""
        return 1 - float((1 - self.retention) ** max(1.0, self.chunk / self.run))

    def popularity(self, model: ModelShape) -> tuple[float, ...]:
        """TierShares of requests, the most frequent prefix first."""
        count = max(1, round(self.data / (self.prefix * model.kv_bytes_per_token())))
        width = max(self.spread * count, 1e-9)
        weights = sorted((exp(-(((i - (count - 1) / 2) / width) ** 2) / 2) for i in range(count)), reverse=True)
        return tuple(weight / sum(weights) for weight in weights)


@dataclass(frozen=True, kw_only=True)
class TieredMachine:
    """Caches in bytes, links in bytes/s. `efficiency`: of the device's peak, computing; 0.59 as CachedAttention prefills."""

    hardware: Hardware
    device_cache: int = 10 * 10**9
    host_cache: int = 32 * 10**9
    disk_read: float = 5e9
    host_link: float | None = None
    efficiency: float = 0.59
    launch: float = 50e-6  # of a layer's kernels, and of handing the selection to the host

    def __post_init__(self) -> None:
        if self.device_cache < 0 or self.host_cache < 0:
            raise ConfigError(f"caches must have 0 or more bytes, got {self.device_cache} and {self.host_cache}")
        if self.disk_read <= 0 or self.pcie <= 0 or not 0 < self.efficiency <= 1:
            raise ConfigError("bandwidths must be more than 0, the efficiency more than 0 and at most 1")

    @property
    def pcie(self) -> float:
        return self.hardware.host_link_bandwidth if self.host_link is None else self.host_link


class LoadUnit(NamedTuple):
    """Chunks of one prefix that are alike; every request for the prefix reads them all. Sizes are per layer."""

    size: float  # bytes
    density: float  # the share of their rows that a request needs
    known: bool  # before the layer's selection


class TierShares(NamedTuple):
    """Where the chunks of a unit lie."""

    device: float
    host: float
    disk: float


class LayerLoad(NamedTuple):
    """One layer's reading for one request: bytes off the disk (whole chunks) and over the host link (rows)."""

    disk: float
    link: float

    def seconds(self, machine: TieredMachine) -> float:
        """Chunks pass both links one behind the other: the slower one sets the pace."""
        return max(self.disk / machine.disk_read, self.link / machine.pcie)


class FirstToken(NamedTuple):
    """One request. `load`: the time that the device waits for bytes, which cannot be hidden (as Figures 3 and 17 count)."""

    ttft: float
    load: float
    disk_bytes: float
    link_bytes: float


def policy(system: System) -> Policy:
    """What decides which chunks are in the faster tiers."""
    if system in ("as", "as+h2o+lru"):
        return "lru"
    return "score" if system in ("+sc", "+sp") else "lfu"


def units(model: ModelShape, work: PrefixWorkload, system: System) -> tuple[LoadUnit, ...]:
    """List the chunks of one prefix that a request reads, per layer (the mean of layers whose probe heads agree
    and of layers that fall back to all keys)."""
    side = work.prefix * model.kv_bytes_per_token() / model.layers / 2  # keys, or values
    if system == "as":
        return (LoadUnit(2 * side, 1.0, True),)
    if system in ("as+h2o+lru", "as+h2o+lfu"):
        return (LoadUnit(side, 1.0, True), *_important(side, work, False))
    probe = LoadUnit(side * min(1.0, work.probes / model.kv_heads), 1.0, True)
    keys = (LoadUnit(side * work.fallback, 1.0, False),) if work.fallback else ()
    sides = side * (1 - work.fallback) + side  # keys where the heads agree, and values
    return (probe, *keys, *_important(sides, work, system != "+itf"))


def _important(side: float, work: PrefixWorkload, reordered: bool) -> tuple[LoadUnit, ...]:
    """The chunks that important rows are in. In the order of the text they are all alike; reordered, those that are
    important on average come first, and what this query wants besides is spread over some of the rest."""
    if not reordered:
        return (LoadUnit(side * work.touched, work.retention / work.touched, False),)
    touched = max(work.retention, work.touched / work.packing)
    rest = max(touched - work.retention, work.retention * (1 - work.recall))
    dense = LoadUnit(side * work.retention, work.recall, False)
    if work.recall == 1 or not rest:
        return (dense,)  # no query wants anything besides
    return dense, LoadUnit(side * rest, work.retention * (1 - work.recall) / rest, False)


Lying = tuple[tuple[LoadUnit, TierShares], ...]


def placed(
    model: ModelShape, work: PrefixWorkload, machine: TieredMachine, system: System
) -> list[list[tuple[float, Lying]]]:
    """For each prefix, the most frequent first, where its units lie when the caches are warm: cases with their shares of
    its requests (one, but for LRU, where a whole prefix moves together and lies where its last request left it)."""
    popularity = work.popularity(model)
    kinds = units(model, work, system)
    whole = sum(unit.size for unit in kinds) * model.layers
    if policy(system) == "lru":
        everywhere = (TierShares(1.0, 0.0, 0.0), TierShares(0.0, 1.0, 0.0), TierShares(0.0, 0.0, 1.0))
        return [
            [(share, tuple((unit, place) for unit in kinds)) for share, place in zip(shares, everywhere, strict=True)]
            for shares in _recent([(rate, whole) for rate in popularity], machine)
        ]
    scored = policy(system) == "score"
    keyed = [
        (rate * (unit.density if scored else 1.0), unit.size * model.layers) for rate in popularity for unit in kinds
    ]
    found = _ranked(keyed, machine)
    rows = [found[i : i + len(kinds)] for i in range(0, len(found), len(kinds))]
    return [[(1.0, tuple(zip(kinds, row, strict=True)))] for row in rows]


def _ranked(keyed: list[tuple[float, float]], machine: TieredMachine) -> list[TierShares]:
    """Of (score, bytes): the highest score in the device's cache, what follows in the host's, the rest on disk. Of equal
    ones an equal share."""
    found = [TierShares(0.0, 0.0, 1.0)] * len(keyed)
    device, host = float(machine.device_cache), float(machine.host_cache)
    order = sorted(range(len(keyed)), key=lambda i: -keyed[i][0])
    for _, equal in groupby(order, key=lambda i: keyed[i][0]):
        alike = list(equal)
        size = sum(keyed[i][1] for i in alike)
        first = min(size, device)
        second = min(size - first, host)
        device, host = device - first, host - second
        for i in alike:
            found[i] = TierShares(first / size, second / size, (size - first - second) / size)
    return found


def _recent(keyed: list[tuple[float, float]], machine: TieredMachine) -> list[TierShares]:
    """Of (rate, bytes): the least recently used goes first, the host's cache behind the device's (Che's approximation)."""

    def inside(capacity: float) -> list[float]:
        if capacity >= sum(size for _, size in keyed):
            return [1.0] * len(keyed)
        low, high = 0.0, 1.0
        while sum(size * (1 - exp(-rate * high)) for rate, size in keyed) < capacity and high < 1e12:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            full = sum(size * (1 - exp(-rate * middle)) for rate, size in keyed) > capacity
            low, high = (low, middle) if full else (middle, high)
        return [1 - exp(-rate * low) for rate, _ in keyed]

    device = inside(machine.device_cache)
    both = inside(machine.device_cache + machine.host_cache)
    return [TierShares(a, b - a, 1 - b) for a, b in zip(device, both, strict=True)]


def _loads(lying: Lying, known: bool) -> LayerLoad:
    disk = link = 0.0
    for unit, shares in lying:
        if unit.known == known:
            disk += unit.size * shares.disk
            link += unit.size * unit.density * (shares.disk + shares.host)
    return LayerLoad(disk, link)


def layer_seconds(model: ModelShape, machine: TieredMachine, new: int, attended: float) -> float:
    """One layer of a prefill of `new` tokens that attend to `attended` before them."""
    flops = model.prefill_flops(new, round(attended)) - model.head_flops
    reading = model.layer_parameters * HALF / machine.hardware.memory_bandwidth
    return machine.launch + max(flops / (machine.hardware.flops * machine.efficiency), reading) / model.layers


def recomputed(model: ModelShape, work: PrefixWorkload, machine: TieredMachine) -> FirstToken:
    """Prefix and query prefilled, nothing loaded."""
    seconds = model.layers * layer_seconds(model, machine, work.prefix + work.query, 0)
    return FirstToken(seconds, 0.0, 0.0, 0.0)


def request(
    model: ModelShape, work: PrefixWorkload, machine: TieredMachine, system: System, lying: Lying
) -> FirstToken:
    """Simulate one request whose prefix's units lie so. Chunks that are known before are loaded ahead, layer by layer, when the links
    have nothing more urgent; selected chunks go first, and the device waits for them."""
    kept = work.prefix if system == "as" else work.prefix * work.retention
    compute = layer_seconds(model, machine, work.query, kept)
    selecting = system != "as"
    probing = work.prefix * (1 if system.startswith("as") else min(1.0, work.probes / model.kv_heads))
    select = machine.launch + _select_seconds(model, machine, work.query, probing) if selecting else 0.0
    ahead, late = _loads(lying, True), _loads(lying, False)
    known, demand = ahead.seconds(machine), late.seconds(machine)
    # All of this layer's rows, for the next one; the share `next_layer` is right.
    guess = demand if system == "+sp" else 0.0

    device = links = 0.0  # when each is free
    done = 0.0  # seconds of known loads, all layers together
    early = 0.0  # of this layer's demand, loaded while the layer before computed
    waited = guessing = 0.0
    for layer in range(model.layers):
        missing = max(0.0, (layer + 1) * known - done)
        done, links = done + missing, links + missing
        start = max(device, links) if missing else device
        chosen = start + select
        done, links = _idle(done, links, chosen, model.layers * known)
        there = chosen
        if selecting and demand > early:
            links = there = max(links, chosen) + demand - early
        waited += start - device + there - chosen
        device = there + compute
        if guess and layer + 1 < model.layers:  # first the next layer's known bytes, then guesses, then the known bytes
            done, links = _idle(done, links, device, (layer + 2) * known)
            spent = min(guess, max(0.0, device - links))
            links, guessing, early = links + spent, guessing + spent, spent * work.next_layer
        done, links = _idle(done, links, device, model.layers * known)
    wrong = guessing * (1 - work.next_layer) / demand if demand else 0.0  # in layers
    layers = model.layers + wrong
    return FirstToken(
        device, waited, model.layers * ahead.disk + layers * late.disk, model.layers * ahead.link + layers * late.link
    )


def _select_seconds(model: ModelShape, machine: TieredMachine, query: int, attended: float) -> float:
    """Scores of the query against the keys that the selection goes by."""
    flops = 2 * model.heads * model.head_dim * query * attended
    return flops / (machine.hardware.flops * machine.efficiency)


def _idle(done: float, links: float, until: float, all_known: float) -> tuple[float, float]:
    """Known loads fill the links' time up to `until`."""
    filled = max(0.0, min(until - links, all_known - done))
    return done + filled, links + filled


def outcomes(
    model: ModelShape, work: PrefixWorkload, machine: TieredMachine, system: System
) -> list[tuple[float, FirstToken]]:
    """All requests that there are, with their shares."""
    if system == "recompute":
        return [(1.0, recomputed(model, work, machine))]
    return [
        (share * part, request(model, work, machine, system, lying))
        for share, cases in zip(work.popularity(model), placed(model, work, machine, system), strict=True)
        for part, lying in cases
    ]


def mean(model: ModelShape, work: PrefixWorkload, machine: TieredMachine, system: System) -> FirstToken:
    found = outcomes(model, work, machine, system)
    return FirstToken(*(sum(share * result[i] for share, result in found) for i in range(4)))


def slowest(
    model: ModelShape, work: PrefixWorkload, machine: TieredMachine, system: System, quantile: float = 0.99
) -> FirstToken:
    """The request at a quantile of times to first token."""
    found = sorted((result, share) for share, result in outcomes(model, work, machine, system))
    below, at = 0.0, 0
    while (below := below + found[at][1]) < quantile and at < len(found) - 1:
        at += 1
    return found[at][0]
