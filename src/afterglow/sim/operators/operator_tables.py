"""`afterglow simulate --operator importance|relay|memo`: what one operator would gain, as tables.

No queue and no policy of the engine is run here: these are the models of single operators, fitted to the figures of the
papers that they are from. `docs/papers.md` has what they give beside what the papers print.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from afterglow.errors import ConfigError
from afterglow.sim.machine import catalogue
from afterglow.sim.machine.catalogue import Hardware
from afterglow.sim.machine.shape import ModelShape
from afterglow.sim.nearest import unknown
from afterglow.sim.operators import importance, memo, relay
from afterglow.sim.operators.importance import SYSTEMS, PrefixWorkload, TieredMachine
from afterglow.sim.operators.relay import MODES, Heads, Roof, attention_seconds
from afterglow.sim.operators.serving import SHAREGPT, ServingModel, requests, serve, sustained

OPERATORS = ("importance", "relay", "memo")
Cell = str | int | float


@dataclass(frozen=True, slots=True)
class OperatorTable:
    """Rows under columns, and what they assume."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "note": self.note, "rows": rows}


@dataclass(frozen=True, kw_only=True)
class OperatorOptions:
    """The options of an operator's tables; None and () stand for the paper's own set-up. Lengths in tokens, sizes in bytes, bytes/s.

    `prefix`: lengths to try (relay: of the system prompt; importance: of the cached prefix; memo: of the sentence).
    Relay: `batch` requests decode together, `context` tokens each have of their own; `seed` draws the server's requests.
    Importance: `new` tokens of a query, `retention`, the bytes of all prefixes (`data`), caches, links. Memo: `hit_rate`.
    """

    model: str | None = None
    hardware: str | None = None
    devices: int = 1
    prefix: tuple[int, ...] = ()
    batch: int = 32
    context: int = 128
    new: int = 64
    disk_read: float = 5e9
    host_link: float | None = None
    retention: float = 0.25
    data: int = 57 * 10**9
    device_cache: int = 10 * 10**9
    host_cache: int = 32 * 10**9
    hit_rate: float = memo.HIT_RATE
    seed: int = 0


def run(name: str, options: OperatorOptions | None = None) -> tuple[OperatorTable, ...]:
    """Compute an operator's tables. Raises: ConfigError (also for an unknown operator, model or device, with the nearest names), ModelError."""
    if name not in _RUNS:
        raise unknown("operator", name, _RUNS)
    options = options or OperatorOptions()
    if options.devices < 1:
        raise ConfigError(f"the number of devices must be 1 or more, got {options.devices}")
    for length in options.prefix:
        if length < 1:
            raise ConfigError(f"prefixes have 1 token or more, got {length}")
    return _RUNS[name](options)


def _named(options: OperatorOptions, model: str, hardware: str) -> tuple[ModelShape, Hardware]:
    return catalogue.model(options.model or model), catalogue.hardware(options.hardware or hardware)


# ---------------------------------------------------------------------------------------------------- relay


def _relay(options: OperatorOptions) -> tuple[OperatorTable, ...]:
    relay.checked(options.batch, options.context, 0)
    return _relay_operator(options), _relay_server(options)


def _relay_operator(options: OperatorOptions) -> OperatorTable:
    model, hardware = _named(options, "LLaMA-30B", "A40")
    heads, roof = Heads.of(model), Roof.of(hardware, options.devices)
    batch, context = options.batch, options.context
    rows: list[tuple[Cell, ...]] = []
    for system in options.prefix or (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        plain, relayed = (attention_seconds(mode, heads, roof, batch, context, system) for mode in ("plain", "relay"))
        printed = relay.printed_speedup(batch, context, system)
        exact = relay.speedup(batch, context, system, heads.query / heads.kv)
        rows.append(
            (
                system,
                *(round(seconds * 1e6, 1) for seconds in (plain, relayed)),
                *(round(p, 2) for p in (plain / relayed, printed, exact)),
            )
        )
    return OperatorTable(
        f"attention of one layer, one decoding step: {model.name} on {options.devices} x {hardware.name}, {batch} requests, "
        f"{context} tokens of their own each",
        ("system", "plain us", "relay us", "speedup", "printed formula", "exact formula"),
        tuple(rows),
        "Each operator takes the longer of moving and computing, and a launch; prefix sharing takes as long as plain. "
        f"{relay.BANDWIDTH_EFFICIENCY:.1%} of the bandwidth and {relay.LAUNCH_S * 1e6:.0f} us a launch, "
        "fitted on an A40.",
    )


def _relay_server(options: OperatorOptions) -> OperatorTable:
    model, hardware = _named(options, "LLaMA-2-7B", "A40")
    rows: list[tuple[Cell, ...]] = []
    note = (
        "Offline throughput, and the Poisson rate at which the latency per token reaches half a second. The server is vLLM "
        "0.2.6 as RelayAttention measured it; host and matrix constants are fitted to its Figure 6."
    )
    work = requests(1000, *SHAREGPT, seed=options.seed)
    for system in options.prefix or (64, 128, 256, 512, 1024, 2048):
        for mode in MODES:
            try:
                server = ServingModel(model=model, hardware=hardware, devices=options.devices, mode=mode, system=system)
                served = serve(server, work)
                rate = sustained(server, SHAREGPT, seed=options.seed)
                found = (round(served.requests_per_s, 2), round(rate, 2), round(served.mean_batch))
                rows.append((system, mode, *found))
            except ConfigError as error:  # the operator's own table is there all the same
                rows.append((system, mode, "-", "-", "-"))
                note = str(error)
    return OperatorTable(
        f"a server with continuous batching: {model.name} on {options.devices} x {hardware.name}, 1,000 requests with the "
        "lengths of ShareGPT",
        ("system", "attention", "requests/s", "at 0.5 s/token", "mean batch"),
        tuple(rows),
        note,
    )


# ----------------------------------------------------------------------------------------------- importance


def _importance(options: OperatorOptions) -> tuple[OperatorTable, ...]:
    model, hardware = _named(options, "OPT-30B", "A100-80G")
    machine = TieredMachine(
        hardware=hardware,
        device_cache=options.device_cache,
        host_cache=options.host_cache,
        disk_read=options.disk_read,
        host_link=options.host_link,
    )
    rows: list[tuple[Cell, ...]] = []
    for prefix in options.prefix or (1024, 2048, 4000):
        work = PrefixWorkload(prefix=prefix, data=options.data, query=options.new, retention=options.retention)
        for system in SYSTEMS:
            mean = importance.mean(model, work, machine, system)
            slowest = importance.slowest(model, work, machine, system)
            times = (round(seconds * 1e3, 1) for seconds in (mean.ttft, mean.load, slowest.ttft))
            rows.append((prefix, system, *times, *(round(size / 1e6) for size in (mean.disk_bytes, mean.link_bytes))))
    return (
        OperatorTable(
            f"first token after a cached prefix: {model.name} on {hardware.name}, {options.new} tokens of a query, "
            f"{options.retention:.0%} of the prefix important",
            ("prefix", "system", "TTFT ms", "waits ms", "p99 ms", "disk MB", "link MB"),
            tuple(rows),
            "as: all keys and values, layer by layer; h2o: all keys, important values; +itf: keys of three probe heads, then "
            "important keys and values; +ro: reordered chunks; +sc: caches by score; +sp: the next layer's likely rows "
            "while this one computes. How important tokens lie is taken from SPEC's Figures 4, 5, 20 and 21.",
        ),
    )


# ----------------------------------------------------------------------------------------------------- memo


def _memo(options: OperatorOptions) -> tuple[OperatorTable, ...]:
    model = catalogue.model(options.model or "LLaMA-2-7B")
    hardware = memo.XEONS if options.hardware is None else catalogue.hardware(options.hardware)
    rows: list[tuple[Cell, ...]] = []
    for tokens in options.prefix or (16, 32, 64, 128, 256):
        times = memo.layer_times(model, hardware, tokens)
        projection = memo.projection_seconds(model, hardware, tokens)
        gains = (
            memo.speedup(times, model.layers, options.hit_rate, projection),
            memo.end_to_end(model, hardware, tokens, options.hit_rate, projection),
            memo.speedup(times, model.layers, 1.0),
        )
        size = memo.map_bytes(model, tokens) / 2**20
        rows.append(
            (
                tokens,
                round(times.full * 1e3, 3),
                round(times.hit * 1e3, 3),
                *(round(x, 3) for x in gains),
                round(size, 1),
            )
        )
    return (
        OperatorTable(
            f"self-attention with maps from memory: {model.name} on {hardware.name}, hit rate {options.hit_rate:.0%}",
            ("tokens", "layer ms", "layer hit ms", "speedup", "with FFN", "all hits", "maps MiB"),
            tuple(rows),
            "speedup: self-attention over all sentences, misses and the search included; with FFN: whole layers; all hits: "
            "what self-attention gains at most.",
        ),
    )


_RUNS: dict[str, Callable[[OperatorOptions], tuple[OperatorTable, ...]]] = {
    "importance": _importance,
    "relay": _relay,
    "memo": _memo,
}
