"""The operator models beside what their papers print: RelayAttention, SPEC (IMPRESS) and AttnCache.

Every row has a figure or table, the paper's value, the model's, the deviation where both are numbers, and whether the value
was fitted. Nothing is measured: no device is needed, and the same seed gives the same numbers.

    python benchmarks/sim_operators.py [--json FILE]     # then benchmarks/sim_operators_plot.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from afterglow.bench.report import COUNTED, arguments, finish, goal, show
from afterglow.sim.catalogue import hardware, model
from afterglow.sim.operator_importance import (
    SPEC,
    SYSTEMS,
    Machine,
    System,
    Workload,
    chunks_loaded,
    device_hits,
    from_tier,
    mean,
    recomputed,
    slowest,
)
from afterglow.sim.operator_memo import (
    HIT_RATE,
    SENTENCE,
    XEONS,
    degradation,
    hit_rate_for,
    layer_times,
    projection_seconds,
    speedup,
)
from afterglow.sim.operator_relay import MODES, Heads, Mode, Roof, attention_seconds, printed_speedup
from afterglow.sim.operator_relay import speedup as counted_speedup
from afterglow.sim.operator_serving import SHAREGPT, Lengths, Server, mmlu_seconds, requests, serve, sustained

Row = dict[str, Any]
FITTED = "fitted"

# RelayAttention, as printed or plotted
FIGURE_1 = {  # us, LLaMA-30B, A40, 32 requests, 128 tokens of context: paged, relay
    64: (270.5, 191.0),
    128: (342, 201),
    256: (501, 211),
    512: (820, 226),
    1024: (1466, 240),
    2048: (2746, 287),
    4096: (5324, 366),
    8192: (10541, 531),
    16384: (20917, 868),
}
FIGURE_5 = {64: (1.42, 1.42), 256: (2.70, 2.38), 1024: (6.91, 6.10), 2048: (10.94, 9.56)}  # theory, practice
FIGURE_6 = {  # requests/s: vLLM, with prefix sharing, with relay
    ("A40", 64): (3.95, 4.06, 4.20),
    ("A40", 512): (2.27, 3.26, 4.15),
    ("A40", 2048): (0.91, 1.90, 3.97),
    ("A100-80G", 64): (8.49, 8.43, 9.08),
    ("A100-80G", 512): (5.40, 6.74, 9.05),
    ("A100-80G", 2048): (2.26, 3.75, 8.81),
}
TABLE_3 = {  # seconds
    ("A100-80G", 1): (502, 336, 306),
    ("A40", 1): (1012, 675, 621),
    ("A100-80G", 3): (851, 378, 311),
    ("A40", 3): (1751, 752, 629),
    ("A100-80G", 5): (1308, 432, 316),
    ("A40", 5): (2660, 850, 641),
}
TABLE_4 = {  # requests/s: model, device, devices, system prompt
    ("LLaMA-2-13B", "A40", 1, 512): (0.99, 1.44, 1.71),
    ("LLaMA-30B", "A100-80G", 2, 512): (2.15, 3.01, 3.65),
    ("Phi-2", "A40", 1, 512): (5.03, 6.29, 8.85),
    ("Mistral-7B", "A40", 1, 512): (3.68, 5.40, 5.90),
    ("LLaMA-2-13B", "A40", 1, 1024): (0.66, 1.23, 1.69),
    ("LLaMA-30B", "A100-80G", 2, 1024): (1.52, 2.55, 3.64),
    ("Phi-2", "A40", 1, 1024): (3.54, 4.82, 8.76),
    ("Mistral-7B", "A40", 1, 1024): (2.60, 4.92, 5.85),
}
FIGURE_8 = (0.50, 0.93, 2.00)  # LLaMA-2-7B, A40, 256 + 512 tokens, system prompt of 2,048
FIGURE_7 = {"shared": 2.2, "relay": 4.9}  # requests/s at 0.5 s/token, A40, system prompt of 2,048

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
TAIL_MACHINE: dict[str, Any] = {"efficiency": 0.2, "disk_read": 0.6e9}  # fitted to the first two of them
STEPS = {("OPT-30B", "RTE"): (60, 30, 10), ("OPT-13B", "COPA"): (36, 8, 56)}  # %, Figure 18: +ITF, +RO, scores
TABLE_1 = {  # speedups: SAN, LazyFormer, AttnCache-f, AttnCache; their mean scores, %; and the full model's
    "LLaMA-2-7B": ((1.45, 1.39, 1.14, 1.19), (30.34, 34.48, 50.39, 67.75), 68.60),
    "Llama-3-8B": ((1.49, 1.42, 1.16, 1.21), (46.81, 46.49, 50.46, 69.63), 71.88),
    "Mistral-7B": ((1.44, 1.38, 1.15, 1.20), (46.39, 45.67, 50.63, 70.31), 72.13),
}
GAMMAS = {  # of the same
    "LLaMA-2-7B": (0.85, 0.87, 1.30, 0.04),
    "Llama-3-8B": (0.51, 0.60, 1.34, 0.11),
    "Mistral-7B": (0.58, 0.70, 1.43, 0.09),
}
METHODS = ("SAN", "LazyFormer", "AttnCache-f", "AttnCache")


def row(figure: str, what: str, paper: float | str, simulated: float | str, note: str = "") -> Row:
    """One row. `deviation`: relative, but for shares in % (` %` in `what`), where it is their difference."""
    deviation = None
    if isinstance(simulated, int | float):
        simulated = float(f"{simulated:.4g}")
        if isinstance(paper, int | float):
            deviation = round((simulated - paper) / 100 if " %" in what else simulated / paper - 1, 4)
    return {
        "figure": figure,
        "what": what,
        "paper": paper,
        "simulated": simulated,
        "deviation": deviation,
        "note": note,
    }


def figure_1() -> Iterator[Row]:
    heads, roof = Heads.of(model("LLaMA-30B")), Roof.of(hardware("A40"))
    modes: tuple[Mode, ...] = ("plain", "relay")
    for system, values in FIGURE_1.items():
        for mode, paper in zip(modes, values, strict=True):
            seconds = attention_seconds(mode, heads, roof, 32, 128, system)
            yield row("RelayAttention Fig. 1", f"{mode} us, s={system}", paper, seconds * 1e6, FITTED)
    cases: tuple[tuple[Mode, float], ...] = (("plain", 98), ("relay", 116))
    for mode, paper in cases:
        seconds = attention_seconds(mode, heads, roof, 1, 128, 2048)
        yield row("RelayAttention, limits", f"{mode} us, one request, s=2048", paper, seconds * 1e6)


def figure_5() -> Iterator[Row]:
    heads, roof = Heads.of(model("LLaMA-30B")), Roof.of(hardware("A40"))
    for system, (theory, practice) in FIGURE_5.items():
        yield row("RelayAttention Fig. 5", f"theory, s={system}", theory, printed_speedup(32, 128, system), "exact")
        found = _gain(heads, roof, 32, 128, system)
        yield row("RelayAttention Fig. 5", f"practice, s={system}", practice, found, "with Fig. 1's constants")
    yield row("RelayAttention Fig. 5", "keys and values counted, s=2048", "", counted_speedup(32, 128, 2048), "spec R5")
    yield row("RelayAttention, limits", "practice, c=256, s=2048", 6.59, _gain(heads, roof, 32, 256, 2048))


def _gain(heads: Heads, roof: Roof, batch: int, context: int, system: int) -> float:
    plain, relay = (attention_seconds(mode, heads, roof, batch, context, system) for mode in ("plain", "relay"))
    return plain / relay


def figure_6(seed: int) -> Iterator[Row]:
    work = requests(1000, *SHAREGPT, seed=seed)
    for (device, system), values in FIGURE_6.items():
        for mode, paper in zip(MODES, values, strict=True):
            server = Server(model=model("LLaMA-2-7B"), hardware=hardware(device), mode=mode, system=system)
            what = f"{device} {mode} req/s, s={system}"
            yield row("RelayAttention Fig. 6", what, paper, serve(server, work).requests_per_s, FITTED)
    for mode in MODES:
        server = Server(model=model("LLaMA-2-7B"), hardware=hardware("A100-PCIE-40G"), mode=mode, system=2048)
        found = serve(server, work).requests_per_s
        yield row("RelayAttention Fig. 6", f"A100-PCIE-40G {mode} req/s, s=2048", "not printed", found)


def figure_7(seed: int) -> Iterator[Row]:
    shape, device = model("LLaMA-2-7B"), hardware("A40")
    for system in (512, 1024, 2048):
        for mode in MODES:
            rate = sustained(Server(model=shape, hardware=device, mode=mode, system=system), SHAREGPT, seed=seed)
            paper = FIGURE_7.get(mode, "") if system == 2048 else ""
            yield row("RelayAttention Fig. 7", f"{mode} req/s at 0.5 s/token, s={system}", paper, rate)
    for note, count, factor in (("5,000 requests", 5000, 1), ("1,000, host twice as slow", 1000, 2)):
        for mode in MODES:
            plain = Server(model=shape, hardware=device, mode=mode, system=2048)
            server = replace(plain, host_step=factor * plain.host_step, host_request=factor * plain.host_request)
            rate = sustained(server, SHAREGPT, count=count, seed=seed)
            yield row(
                "RelayAttention Fig. 7", f"{mode} req/s, s=2048, {note}", FIGURE_7.get(mode, ""), rate, "sensitivity"
            )


def figure_8() -> Iterator[Row]:
    for prompt, reply in ((64, 128), (128, 256), (256, 512)):
        for system in (64, 512, 2048):
            printed = (prompt, system) == (256, 2048)
            work = requests(1000, Lengths(prompt, prompt), Lengths(reply, reply))
            for mode, paper in zip(MODES, FIGURE_8, strict=True):
                server = Server(model=model("LLaMA-2-7B"), hardware=hardware("A40"), mode=mode, system=system)
                what = f"{prompt}+{reply} {mode} req/s, s={system}"
                yield row("RelayAttention Fig. 8", what, paper if printed else "", serve(server, work).requests_per_s)


def table_3(seed: int) -> Iterator[Row]:
    for (device, shots), values in TABLE_3.items():
        for mode, paper in zip(MODES, values, strict=True):
            seconds = mmlu_seconds(model("LLaMA-2-7B"), hardware(device), mode, shots, seed=seed)
            yield row("RelayAttention Table 3", f"{device} {shots}-shot {mode} s", paper, seconds)


def table_4(seed: int) -> Iterator[Row]:
    work = requests(1000, *SHAREGPT, seed=seed)
    for (name, device, devices, system), values in TABLE_4.items():
        for mode, paper in zip(MODES, values, strict=True):
            server = Server(model=model(name), hardware=hardware(device), devices=devices, mode=mode, system=system)
            note = FITTED if devices > 1 and system == 512 else ""
            what = f"{name} {mode} req/s, s={system}"
            yield row("RelayAttention Table 4", what, paper, serve(server, work).requests_per_s, note)


# ------------------------------------------------------------------------------------------------------- SPEC


def work_of(name: str, data_set: str, **other: Any) -> Workload:
    prefix, gigabytes, retention = DATA_SETS[data_set]
    prefix = OPT_30B_PREFIX if name == "OPT-30B" else prefix
    return Workload(**{"prefix": prefix, "data": gigabytes * 10**9, "retention": retention, **other})


def spec_3() -> Iterator[Row]:
    shape, machine = model("OPT-6.7B"), Machine(hardware=hardware("A100-80G"))
    for prefix in (128, 512, 2048, 8192):
        again = recomputed(shape, Workload(prefix=prefix, data=1), machine)
        yield row("SPEC Fig. 3", f"recompute ms, {prefix}", "", again.ttft * 1e3)
        for tier in TIERS:
            found = from_tier(shape, prefix, 64, machine, tier)
            yield row("SPEC Fig. 3", f"from {tier} ms, {prefix}", "", found.ttft * 1e3)
            if tier == "disk":
                paper: float | str = {128: 51, 8192: 98}.get(prefix, "")
                yield row("SPEC Fig. 3", f"waiting for disk %, {prefix}", paper, 100 * found.load / found.ttft)


def spec_16_to_21() -> tuple[list[Row], list[dict[str, Any]]]:
    """The rows, and for the plot the times of all systems."""
    machine = Machine(hardware=hardware("A100-80G"))
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
        machine = replace(Machine(hardware=hardware("A100-80G")), **other)
        for system, paper in TAIL.items():
            seconds = slowest(shape, work, machine, system).ttft
            said = f"{FITTED}: {note}" if note and system in ("recompute", "as") else note
            yield row("SPEC VI-B, p99", f"{system} s{', slow' if note else ''}", paper, seconds, said)
    machine = replace(machine, device_cache=0, host_cache=0)
    seconds = slowest(shape, work, machine, SPEC).ttft
    yield row("SPEC VI-B, p99", f"{SPEC} s, slow, no caches", TAIL[SPEC], seconds, "sensitivity")


def spec_25() -> Iterator[Row]:
    machine = Machine(hardware=hardware("A100-80G"))
    for name in ("LLaMA-2-7B", "LLaMA-2-13B"):
        for data_set in ("PIQA", "COPA"):
            shape, work = model(name), work_of(name, data_set)
            best = min(mean(shape, work, machine, system).ttft for system in SYSTEMS[:4])
            found = best / mean(shape, work, machine, SPEC).ttft
            yield row("SPEC Fig. 25", f"{name} {data_set}, x faster", "1.7-2.7", found)


def spec_sensitivity() -> Iterator[Row]:
    """What the paper leaves open, one at a time: OPT-13B on RTE."""
    shape, machine = model("OPT-13B"), Machine(hardware=hardware("A100-80G"))
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


# -------------------------------------------------------------------------------------------------- AttnCache


def attncache() -> Iterator[Row]:
    for name, (speedups, scores, full) in TABLE_1.items():
        shape = model(name)
        times, each = layer_times(shape, XEONS, SENTENCE), projection_seconds(shape, XEONS, SENTENCE)
        figure, layers = "AttnCache Table 1", shape.layers
        fit = FITTED if name == "LLaMA-2-7B" else ""
        yield row(figure, f"{name} LazyFormer, x", speedups[1], speedup(times, layers, 0.5), fit)
        yield row(figure, f"{name} AttnCache, x", speedups[3], speedup(times, layers, HIT_RATE, each), "hit rate 30 %")
        share = hit_rate_for(times, layers, speedups[0])
        yield row(figure, f"{name} SAN, share of layers", "not printed", share, f"that gives {speedups[0]}")
        least, most = (hit_rate_for(times, layers, speedups[2], x * each * layers) for x in (0.1, 1.0))
        yield row(
            figure,
            f"{name} AttnCache-f, hit rate",
            "not printed",
            f"{least:.2f}-{most:.2f}",
            f"that gives {speedups[2]}, a layer's search taking 0.06-0.6 ms",
        )
        for method, paper, score, speed in zip(METHODS, GAMMAS[name], scores, speedups, strict=True):
            found = degradation(full / 100, score / 100, speed)
            yield row("AttnCache Table 1", f"{name} {method}, gamma", paper, round(found, 2), "from the printed values")


def main(args: list[str]) -> int:
    options = arguments("sim_operators", __doc__ or "").parse_args(args)
    rows = [*figure_1(), *figure_5(), *figure_6(options.seed), *figure_7(options.seed), *figure_8()]
    rows += [*table_3(options.seed), *table_4(options.seed), *spec_3()]
    found, times = spec_16_to_21()
    rows += [*found, *spec_tail(), *spec_25(), *spec_sensitivity(), *attncache()]
    for figure in dict.fromkeys(r["figure"] for r in rows):
        chosen = [r for r in rows if r["figure"] == figure]
        show(figure, ("", "paper", "simulated", "deviation", ""), [_shown(r) for r in chosen])
    finish(options, rows, goals(rows), times=times)
    return 0


def _shown(found: Row) -> tuple[str, ...]:
    unit = "pt" if " %" in found["what"] else "%"
    deviation = "" if found["deviation"] is None else f"{100 * found['deviation']:+.0f} {unit}"
    paper, simulated = (f"{x:g}" if isinstance(x, float) else str(x) for x in (found["paper"], found["simulated"]))
    return found["what"], paper, simulated, deviation, found["note"]


def goals(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """How far the models are off, figure by figure; what was fitted and what was not apart."""

    def worst(figure: str, fitted: bool) -> float:
        chosen = [r for r in rows if r["figure"] == figure and r["deviation"] is not None]
        chosen = [r for r in chosen if r["note"].startswith(FITTED) == fitted and r["note"] != "sensitivity"]
        return max(float(abs(r["deviation"])) for r in chosen)

    return [
        goal(
            "RelayAttention Fig. 1, largest deviation (fitted)",
            worst("RelayAttention Fig. 1", True),
            0.1,
            least=False,
            spread=COUNTED,
        ),
        goal(
            "RelayAttention Fig. 5, largest deviation",
            worst("RelayAttention Fig. 5", False),
            0.1,
            least=False,
            spread=COUNTED,
        ),
        goal(
            "RelayAttention Fig. 6, largest deviation (fitted)",
            worst("RelayAttention Fig. 6", True),
            0.2,
            least=False,
            spread=COUNTED,
        ),
        goal(
            "RelayAttention Fig. 7, largest deviation",
            worst("RelayAttention Fig. 7", False),
            0.2,
            least=False,
            spread=COUNTED,
        ),
        goal(
            "RelayAttention Fig. 8, largest deviation",
            worst("RelayAttention Fig. 8", False),
            0.2,
            least=False,
            spread=COUNTED,
        ),
        goal(
            "RelayAttention Table 3, largest deviation",
            worst("RelayAttention Table 3", False),
            0.25,
            least=False,
            spread=COUNTED,
        ),
        goal(
            "RelayAttention Table 4, largest deviation",
            worst("RelayAttention Table 4", False),
            0.25,
            least=False,
            spread=COUNTED,
        ),
        goal("SPEC Fig. 3, largest difference", worst("SPEC Fig. 3", False), 0.1, least=False, spread=COUNTED),
        goal("SPEC Fig. 16, ends of the range (fitted)", worst("SPEC Fig. 16", True), 0.2, least=False, spread=COUNTED),
        goal("SPEC Fig. 18, largest difference", worst("SPEC Fig. 18", False), 0.1, least=False, spread=COUNTED),
        goal("SPEC Fig. 21, largest difference", worst("SPEC Fig. 21", False), 0.1, least=False, spread=COUNTED),
        goal("SPEC p99, largest deviation", worst("SPEC VI-B, p99", False), 0.3, least=False, spread=COUNTED),
        goal(
            "AttnCache Table 1, largest deviation", worst("AttnCache Table 1", False), 0.1, least=False, spread=COUNTED
        ),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
