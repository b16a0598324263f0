"""`python -m benchmarks.gpu.results`: what was measured on a GPU (benchmarks/results/gpu), as tables in Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.common.paths import RESULTS
from benchmarks.gpu.parts import PARTS

FOLDER = RESULTS / "gpu"

Row = dict[str, Any]


class Shown(NamedTuple):
    """A table: the part whose rows it has, a title, columns, and what adds columns to the rows, from a part's whole file."""

    part: str
    title: str
    columns: tuple[str, ...]
    added: Callable[[Row], list[Row]] = lambda part: part["rows"]


def main() -> None:
    found = {name: json.loads(file.read_text()) for name in PARTS if (file := FOLDER / f"{name}.json").is_file()}
    hardware = next(iter(found.values()))["hardware"]
    print(f"{hardware['gpu']}, torch {hardware['torch']}.\n")
    _table(
        "Ceilings, which each part measures itself, and which its bounds and shares are of (suites of tests ran side by side: theirs are none)",
        ("part", "GB/s from locked host memory", "GB/s of device memory", "TFLOP/s of a matrix product", "commit"),
        [
            (
                name,
                *(part["ceilings"][key] / unit for key, unit in (("copy", 1e9), ("memory", 1e9), ("flops", 1e12))),
                part["commit"],
            )
            for name, part in found.items()
            if not name.startswith("tests-")
        ],
    )
    _table(
        "Goals",
        ("part", "goal", "value", "wanted", "met", "commit"),
        [
            (name, goal["name"], goal["value"], goal["goal"], "yes" if goal["met"] else "no", part["commit"])
            for name, part in found.items()
            for goal in part["goals"]
        ],
    )
    for shown in TABLES:
        if shown.part in found:
            part = found[shown.part]
            rows = [[row.get(column, "") for column in shown.columns] for row in shown.added(part)]
            _table(f"{shown.title} ({part['commit']})", shown.columns, rows)


def over_the_bound(part: Row) -> list[Row]:
    """Add what steps take beyond their bound."""
    return [{**row, "over_ms": row["step_ms"] - row["bound_ms"]} for row in part["rows"]]


def over_the_copy(part: Row) -> list[Row]:
    """Add what reuse takes beyond a copy of the rows."""
    return [{**row, "over_ms": row["reused_ms"] - row["copy_ms"]} for row in part["rows"]]


def rates_of_rows(part: Row) -> list[Row]:
    """Add what plain attention and relay take beyond their bounds, and the rates at which they read: of the rows that a prefix has
    more than the one before, bytes by microseconds.

    A bound is bytes by the memory's rate, so two bounds of plain attention tell how many bytes its requests read more, and two of relay how
    many rows are read more once for all.
    """
    rows = [
        {**row, **{f"{way}_over_us": row[f"{way}_us"] - row[f"{way}_bound_us"] for way in ("plain", "relay")}}
        for row in part["rows"]
    ]
    for before, row in pairwise(rows):
        for way in ("plain", "relay"):
            longer, bound = (row[key] - before[key] for key in (f"{way}_us", f"{way}_bound_us"))
            row[f"{way}_tb_s"] = bound / longer * part["ceilings"]["memory"] / 1e12
    return rows


TABLES = (
    Shown(
        "decode",
        "Decode steps of Llama-3-8B's shape, bfloat16",
        ("requests", "context", "step_ms", "tokens_per_s", "bound_ms", "over_ms", "share"),
        over_the_bound,
    ),
    Shown(
        "prefill",
        "Time to the first token of Llama-3-8B's shape; share: of the matrix product's rate",
        ("tokens", "ms", "tokens_per_s", "share"),
    ),
    Shown(
        "documents",
        "Documents, Mistral-7B's shape: computed, reused from host memory, and their rows copied; over: reused, less the copy",
        ("tokens", "computed_ms", "reused_ms", "gain", "copy_ms", "over_ms", "share_of_copy"),
        over_the_copy,
    ),
    Shown(
        "relay-operator",
        "Attention of one layer, 32 requests with 128 tokens of their own behind a prefix, in microseconds, in CUDA graphs",
        ("prefix", "plain_us", "shared_us", "relay_us", "plain_bound_us", "relay_bound_us", "gain", "theory", "of_theory", "relay_launched_us"),
    ),
    Shown(
        "relay-operator",
        "The same: over the bounds, and the rate in TB/s at which the rows are read that a prefix has more than the one before (relay: shared rows, once)",
        ("prefix", "plain_over_us", "relay_over_us", "plain_tb_s", "relay_tb_s"),
        rates_of_rows,
    ),
    Shown(
        "reuse",
        "Figure 18, LLaMA-13B's shape, 1,000 tokens",
        ("history", "new", "computed_ms", "whole_ms", "layerwise_ms", "gain", "copy_ms"),
    ),
    Shown("preloading", "Figure 19, LLaMA-13B's shape", ("variant", "ms", "less", "paper", "copy_ms")),
    Shown(
        "saving",
        "Figure 20, LLaMA-13B's shape",
        ("prompt", "off_ms", "beside_ms", "awaited_ms", "beside_over_off", "copy_ms"),
    ),
)  # fmt: skip


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    print(f"{title}:\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(_cell(each) for each in row)} |")
    print()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value}"


if __name__ == "__main__":
    main()
