"""The figures of benchmarks/results/quantized_peers.json as tables, on the terminal and as Markdown, and the goals over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from afterglow.bench.report import goal, verdict
from benchmarks.peers.rounds import ratio

Rows = list[dict[str, Any]]

HEADS = (
    "load, first, s",
    "load again, s",
    "resident, GB",
    "at most, GB",
    "prefill, tokens/s",
    "decode 1",
    "of the bound",
    "decode 8",
    "TTFT, second turn, ms",
    "TTFT, after a restart, ms",
)
ORDER = ("Q4_K_M", "Q4_0", "Q4_1", "Q8_0", "int4", "int8")
SHAPE, KIND = "1.1b", "Q4_0"
LOADS = {"load, first": 4.0, "load": 2.0}  # seconds
BESIDE = 0.5e9  # bytes in memory besides the weights
TIMES = {"prefill": 2.0, "decode 8": 2.5}  # as fast as llama.cpp
DECODE = 1.5  # as well, in turns
RATES = ("prefill", "decode 1", "decode 8")


def show_all(rows: Rows, bounds: dict[str, dict[str, float]]) -> None:
    for model in dict.fromkeys(row["model"] for row in rows):
        print(_lines(("", *HEADS), cells(rows, model, bounds[model]), model))


def cells(rows: Rows, model: str, bounds: dict[str, float]) -> list[list[str]]:
    """One line for each arm, the engines of one file side by side. `bounds`: tokens/s that memory allows, by kind."""
    by = {(row["kind"], row["engine"], row["measure"]): row for row in rows if row["model"] == model}
    arms = sorted(
        dict.fromkeys((kind, engine) for kind, engine, _ in by), key=lambda arm: (ORDER.index(arm[0]), arm[1])
    )

    def cell(arm: tuple[str, str], measure: str, scale: float = 1.0) -> str:
        found = by.get((*arm, measure))
        if found is None:
            return ""
        value = scale * found["value"]
        form = f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
        return f"{form} ± {100 * found['spread']:.0f} %" if len(found["samples"]) > 1 else form

    def share(arm: tuple[str, str]) -> str:
        found, bound = by.get((*arm, "decode 1")), bounds.get(arm[0])
        return f"{100 * found['value'] / bound:.0f} %" if found and bound else ""

    return [
        [
            f"{kind}, {engine}",
            cell((kind, engine), "load, first"),
            cell((kind, engine), "load"),
            cell((kind, engine), "resident", 1e-9),
            cell((kind, engine), "peak", 1e-9),
            cell((kind, engine), "prefill"),
            cell((kind, engine), "decode 1"),
            share((kind, engine)),
            cell((kind, engine), "decode 8"),
            cell((kind, engine), "ttft of a second turn", 1e3),
            cell((kind, engine), "ttft after a restart", 1e3),
        ]
        for kind, engine in arms
    ]


def goals(rows: Rows, models: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the 1.1 B shape in Q4_0, whose repacked form is llama.cpp's best."""
    by = {(r["engine"], r["measure"]): r for r in rows if r["model"] == SHAPE and r["kind"] == KIND}
    if ("afterglow", "load") not in by:
        return []
    name, found = f"{SHAPE}, {KIND}", []
    for measure, seconds in LOADS.items():
        row = by["afterglow", measure]
        found.append(goal(f"{name}: {measure}, s", row["value"], seconds, least=False, spread=row["spread"]))
    row = by["afterglow", "resident"]
    beside = row["value"] - models[SHAPE]["bytes"][KIND]
    found.append(
        goal(f"{name}: resident besides the weights, bytes", beside, BESIDE, least=False, spread=row["spread"])
    )
    for measure, wanted in TIMES.items():
        if ("llama-cpp", measure) in by:
            value, noise = ratio(by["afterglow", measure], by["llama-cpp", measure])
            found.append(goal(f"{name}: {measure} / llama.cpp", value, wanted, least=True, spread=noise))
    if pairs := models[SHAPE]["decode in turns"].get(KIND):
        what = f"{name}: decode 1 in turns / llama.cpp"
        found.append(goal(what, pairs["quotient"], DECODE, least=True, spread=pairs["spread"]))
    return found


def markdown(found: dict[str, Any]) -> str:
    """All of the file as Markdown: the machine, a table for each model, the flags of llama.cpp, the goals."""
    speed, settings = found["bandwidth"] / 1e9, found["settings"]
    packages = ", ".join(f"{name} {version}" for name, version in found["versions"]["llama-cpp"].items())
    quick = ", a quick run" if found["quick"] else ""
    parts = [
        f"{found['hardware']['cpu']}, {settings['threads']} threads for both, memory read at {speed:.1f} GB/s. Afterglow "
        f"{found['commit']}; {packages}{quick}.\n"
    ]
    for model, facts in found["models"].items():
        agreement = ", ".join(f"{kind} {said}" for kind, said in facts["first tokens"].items())
        chosen = ", ".join(
            f"{name.removeprefix('llama-cpp ')} {_flags(flags)}" for name, flags in facts["chosen"].items()
        )
        parts.append(_lines(("", *HEADS), cells(found["rows"], model, found["bounds"][model]), f"**{model}**"))
        parts.append(f"llama.cpp is ahead in: {'; '.join(behind(found['rows'], model)) or 'nothing'}.\n")
        in_turns = ", ".join(
            f"{kind} {pairs['quotient']:.2f} times ± {100 * pairs['spread']:.0f} %"
            for kind, pairs in facts["decode in turns"].items()
        )
        parts.append(f"Decode of one sequence in turns of a second, Afterglow's rate over llama.cpp's: {in_turns}.\n")
        parts.append(f"llama.cpp's flags: {chosen}. First tokens that are the same: {agreement}.\n")
        parts += [f"Left out: {name} ({reason}).\n" for name, reason in facts["left out"].items()]
    verdicts = [
        [g["name"], f"{g['value']:.3g}", g["goal"], verdict(g).replace("MISSED", "**missed**")] for g in found["goals"]
    ]
    if verdicts:
        parts.append(_lines(("goal", "measured", "wanted", ""), verdicts))
    return "\n".join(parts)


def behind(rows: Rows, model: str) -> list[str]:
    """Where llama.cpp's median on the same file is better than Afterglow's, and by how much."""
    by = {(r["measure"], r["kind"], r["engine"]): r["value"] for r in rows if r["model"] == model}
    found: dict[str, list[str]] = {}
    for (measure, kind, engine), theirs in by.items():
        ours = by.get((measure, kind, "afterglow"))
        if engine == "llama-cpp" and ours is not None:
            ahead = theirs / ours if measure in RATES else ours / theirs  # rates are better the larger they are
            if ahead > 1:
                found.setdefault(measure, []).append(f"{kind} {ahead:.2f} times")
    return [f"{measure} ({', '.join(kinds)})" for measure, kinds in found.items()]


def _flags(flags: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in flags.items()) or "defaults"


def _lines(heads: Sequence[str], lines: Sequence[Sequence[str]], corner: str = "") -> str:
    rows = [(corner or heads[0], *heads[1:]), ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def brief(found: dict[str, Any], command: str) -> str:
    """The 1.1 B shape in a few lines, for the README: `command` says how the run was made."""
    by = {(r["kind"], r["engine"], r["measure"]): r["value"] for r in found["rows"] if r["model"] == SHAPE}
    said = {
        "load": ("from opening the file until it answers", "{:.1f} s", 1.0),
        "resident": ("resident memory then", "{:.1f} GB", 1e-9),
        "prefill": ("prefill of 512 tokens, tokens/s", "{:,.0f}", 1.0),
        "decode 1": ("decode, batch 1", "{:.1f}", 1.0),
        "decode 8": ("decode, batch 8", "{:,.0f}", 1.0),
        "ttft of a second turn": ("TTFT of a second turn, from memory", "{:,.0f} ms", 1e3),
        "ttft after a restart": ("TTFT after a restart, from disk", "{:,.0f} ms", 1e3),
    }
    kinds, engines = ("Q4_0", "Q4_K_M", "Q8_0"), {"afterglow": "Afterglow", "llama-cpp": "llama.cpp"}
    heads = [f"{name}, {kind}" for kind in kinds for name in engines.values()]
    lines = []
    for measure, (name, form, scale) in said.items():
        values = [by.get((kind, engine, measure)) for kind in kinds for engine in engines]
        lines.append([name, *("" if value is None else form.format(scale * value) for value in values)])
    return _lines(("", *heads), lines, f"{command}, 1.1 B parameters")
