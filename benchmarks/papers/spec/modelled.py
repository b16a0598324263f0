"""SPEC's figures beside the operator model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from afterglow.sim.machine.catalogue import hardware, model
from afterglow.sim.machine.shape import ModelShape
from afterglow.sim.operators.importance import (
    SPEC,
    SYSTEMS,
    FirstToken,
    PrefixWorkload,
    System,
    TieredMachine,
    TierShares,
    mean,
    placed,
    recomputed,
    request,
    slowest,
    units,
)
from benchmarks.papers.modelled_rows import FITTED, Row, row

# SPEC and AttnCache
DATA_SETS = {"PIQA": (4800, 55, 0.25), "RTE": (5000, 57, 0.25), "COPA": (5600, 64, 0.5), "OpenBookQA": (5700, 65, 0.25)}
TIERS: tuple[Literal["device", "host", "disk"], ...] = ("device", "host", "disk")
OPT = ("OPT-6.7B", "OPT-13B", "OPT-30B")
OPT_30B_PREFIX, LONGEST = 4000, 4096
TAIL: dict[System, float] = {
    "recompute": 3.9,
    "as": 9.3,
    "as+h2o+lru": 6.6,
    "as+h2o+lfu": 5.9,
    SPEC: 2.9,
}  # s, p99, OPT-30B, RTE
TAIL_MACHINE: dict[str, Any] = {"efficiency": 0.2, "disk_read": 0.6e9}  # fitted to the first two
STEPS = {("OPT-30B", "RTE"): (60, 30, 10), ("OPT-13B", "COPA"): (36, 8, 56)}  # %, Figure 18: +ITF, +RO, scores


# ------------------------------------------------------------------------------------------------------- SPEC


def work_of(name: str, data_set: str, **other: Any) -> PrefixWorkload:
    prefix, gigabytes, retention = DATA_SETS[data_set]
    prefix = OPT_30B_PREFIX if name == "OPT-30B" else prefix
    return PrefixWorkload(**{"prefix": prefix, "data": gigabytes * 10**9, "retention": retention, **other})


def spec_3() -> Iterator[Row]:
    shape, machine = model("OPT-6.7B"), TieredMachine(hardware=hardware("A100-80G"))
    for prefix in (128, 512, 2048, 8192):
        again = recomputed(shape, PrefixWorkload(prefix=prefix, data=1), machine)
        yield row("SPEC Fig. 3", f"recompute ms, {prefix}", "", again.ttft * 1e3)
        for tier in TIERS:
            found = from_tier(shape, prefix, 64, machine, tier)
            yield row("SPEC Fig. 3", f"from {tier} ms, {prefix}", "", found.ttft * 1e3)
            if tier == "disk":
                paper: float | str = {128: 51, 8192: 98}.get(prefix, "")
                yield row("SPEC Fig. 3", f"waiting for disk %, {prefix}", paper, 100 * found.load / found.ttft)


def spec_16_to_21() -> tuple[list[Row], list[dict[str, Any]]]:
    """The rows, and for the plot the times of all systems."""
    machine = TieredMachine(hardware=hardware("A100-80G"))
    rows: list[Row] = []
    times: list[dict[str, Any]] = []
    faster: list[float] = []
    less: list[float] = []
    chunks: list[float] = []
    hits: dict[System, list[float]] = {"+ro": [], SPEC: []}
    for name in OPT:
        for data_set in DATA_SETS:
            shape, work = model(name), work_of(name, data_set)
            found = {system: mean(shape, work, machine, system) for system in SYSTEMS}
            times.append({"model": name, "data": data_set, **{s: round(r.ttft, 5) for s, r in found.items()}})
            faster.append(min(found[s].ttft for s in SYSTEMS[:4]) / found[SPEC].ttft)
            rows.append(row("SPEC Fig. 16", f"{name} {data_set}, x faster", "1.2-2.8", faster[-1]))
            less.append(min(found[s].load for s in SYSTEMS[1:4]) / found[SPEC].load)
            rows.append(row("SPEC Fig. 17", f"{name} {data_set}, x less loading", "1.5-3.8", less[-1]))
            hits = {s: [*old, device_hits(shape, work, machine, s)] for s, old in hits.items()}
            chunks.append(chunks_loaded(shape, work, "+itf") / chunks_loaded(shape, work, "+ro"))
            if (name, data_set) in STEPS:
                ladder = [found[s].ttft for s in ("as+h2o+lfu", "+itf", "+ro", SPEC)]
                for i, step in enumerate(("+ITF", "+RO", "+scores")):
                    share = 100 * (ladder[i] - ladder[i + 1]) / (ladder[0] - ladder[-1])
                    paper = STEPS[name, data_set][i]
                    rows.append(row("SPEC Fig. 18", f"{name} {data_set} {step} %", paper, share))
            rows.append(
                row("SPEC, no figure", f"{name} {data_set}, prefetching, x", "", found[SPEC].ttft / found["+sp"].ttft)
            )
    rows += [
        row("SPEC Fig. 16", "least, x", 1.2, min(faster), FITTED),
        row("SPEC Fig. 16", "most, x", 2.8, max(faster), FITTED),
        row("SPEC Fig. 17", "least, x", 1.5, min(less), FITTED),
        row("SPEC Fig. 17", "most, x", 3.8, max(less), FITTED),
        row("SPEC Fig. 20", "chunks, x fewer, mean", 1.2, sum(chunks) / len(chunks), FITTED),
        row("SPEC Fig. 21", "device hits %, by frequency", 68, 100 * sum(hits["+ro"]) / 12),
        row("SPEC Fig. 21", "device hits %, by score", 80, 100 * sum(hits[SPEC]) / 12),
    ]
    return rows, times


def spec_tail() -> Iterator[Row]:
    shape, work = model("OPT-30B"), work_of("OPT-30B", "RTE", prefix=LONGEST)
    for note, other in (("", {}), ("20 % of the peak, 0.6 GB/s of disk", TAIL_MACHINE)):
        machine = replace(TieredMachine(hardware=hardware("A100-80G")), **other)
        for system, paper in TAIL.items():
            seconds = slowest(shape, work, machine, system).ttft
            said = f"{FITTED}: {note}" if note and system in ("recompute", "as") else note
            yield row("SPEC VI-B, p99", f"{system} s{', slow' if note else ''}", paper, seconds, said)
    machine = replace(machine, device_cache=0, host_cache=0)
    seconds = slowest(shape, work, machine, SPEC).ttft
    yield row("SPEC VI-B, p99", f"{SPEC} s, slow, no caches", TAIL[SPEC], seconds, "sensitivity")


def spec_25() -> Iterator[Row]:
    machine = TieredMachine(hardware=hardware("A100-80G"))
    for name in ("LLaMA-2-7B", "LLaMA-2-13B"):
        for data_set in ("PIQA", "COPA"):
            shape, work = model(name), work_of(name, data_set)
            best = min(mean(shape, work, machine, system).ttft for system in SYSTEMS[:4])
            found = best / mean(shape, work, machine, SPEC).ttft
            yield row("SPEC Fig. 25", f"{name} {data_set}, x faster", "1.7-2.7", found)


def spec_sensitivity() -> Iterator[Row]:
    """What the paper leaves open, one at a time: OPT-13B on RTE."""
    shape, machine = model("OPT-13B"), TieredMachine(hardware=hardware("A100-80G"))
    cases: list[dict[str, Any]] = [{"spread": s} for s in (0.12, 0.17, 0.25, 0.5, 1.0)]
    cases += [{"run": r} for r in (4.0, 32.0)] + [{"fallback": f} for f in (0.0, 0.4)]
    cases += (
        [{"query": q} for q in (16, 256)] + [{"next_layer": n} for n in (0.3, 0.9)] + [{"chunk": c} for c in (16, 256)]
    )
    for case in cases:
        work = work_of("OPT-13B", "RTE", **case)
        best = min(mean(shape, work, machine, system).ttft for system in SYSTEMS[:4])
        ((name, value),) = case.items()
        system = "+sp" if name == "next_layer" else SPEC
        yield row(
            "SPEC, sensitivity", f"{name} {value:g}, x faster", "", best / mean(shape, work, machine, system).ttft
        )


def from_tier(
    model: ModelShape, prefix: int, query: int, machine: TieredMachine, tier: Literal["device", "host", "disk"]
) -> FirstToken:
    """Simulate a whole prefix in one tier, loaded layer by layer (Figure 3)."""
    work = PrefixWorkload(prefix=prefix, data=1, query=query)
    shares = TierShares(*(1.0 if tier == name else 0.0 for name in TierShares._fields))
    return request(model, work, machine, "as", tuple((unit, shares) for unit in units(model, work, "as")))


def device_hits(model: ModelShape, work: PrefixWorkload, machine: TieredMachine, system: System) -> float:
    """Of the rows that requests need, the share found on the device (Figure 21)."""
    needed = found = 0.0
    for rate, cases in zip(work.popularity(model), placed(model, work, machine, system), strict=True):
        for part, lying in cases:
            for unit, shares in lying:
                rows = rate * part * unit.size * unit.density
                needed += rows
                found += rows * shares.device
    return found / needed


def chunks_loaded(model: ModelShape, work: PrefixWorkload, system: System) -> float:
    """Of one prefix, over all layers, chunks of keys and values that a request reads (Figure 20)."""
    row = model.kv_bytes_per_token() / model.layers / 2
    return model.layers * sum(unit.size for unit in units(model, work, system)) / row / work.chunk
