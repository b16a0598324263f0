"""`python -m benchmarks.gpu.results`: what was measured on a GPU (benchmarks/results/gpu), as tables in Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.common.paths import RESULTS
from benchmarks.gpu.parts import PARTS

FOLDER = RESULTS / "gpu"
TABLES: dict[str, tuple[str, tuple[str, ...]]] = {  # title, and columns that are shown
    "decode": (
        "Decode steps of Llama-3-8B's shape, bfloat16",
        ("requests", "context", "step_ms", "tokens_per_s", "bound_ms", "share"),
    ),
    "prefill": (
        "Time to the first token of Llama-3-8B's shape; share: of the matrix product's rate",
        ("tokens", "ms", "tokens_per_s", "share"),
    ),
    "documents": (
        "Documents, Mistral-7B's shape: computed, reused from host memory, and their rows copied",
        ("tokens", "computed_ms", "reused_ms", "gain", "copy_ms", "share_of_copy"),
    ),
    "relay-operator": (
        "Attention of one layer, 32 requests with 128 tokens of their own behind a prefix, in microseconds, in CUDA graphs",
        ("prefix", "plain_us", "shared_us", "relay_us", "plain_bound_us", "relay_bound_us", "gain", "theory", "of_theory", "relay_launched_us"),
    ),
    "reuse": (
        "Figure 18, LLaMA-13B's shape, 1,000 tokens",
        ("history", "new", "computed_ms", "whole_ms", "layerwise_ms", "gain", "copy_ms"),
    ),
    "preloading": ("Figure 19, LLaMA-13B's shape", ("variant", "ms", "less", "paper", "copy_ms")),
    "saving": (
        "Figure 20, LLaMA-13B's shape",
        ("prompt", "off_ms", "beside_ms", "awaited_ms", "beside_over_off", "copy_ms"),
    ),
}  # fmt: skip


def main() -> None:
    found = {name: json.loads(file.read_text()) for name in PARTS if (file := FOLDER / f"{name}.json").is_file()}
    first = found["decode"]
    ceilings = first["ceilings"]
    print(
        f"{first['hardware']['gpu']}, torch {first['hardware']['torch']}: {ceilings['copy'] / 1e9:.0f} GB/s from locked host memory, "
        f"{ceilings['memory'] / 1e9:,.0f} GB/s of device memory, {ceilings['flops'] / 1e12:.0f} TFLOP/s of a matrix product.\n"
    )
    goals = [(name, goal) for name, part in found.items() for goal in part["goals"]]
    _table(
        "Goals",
        ("part", "goal", "value", "wanted", "met", "commit"),
        [
            (name, goal["name"], goal["value"], goal["goal"], "yes" if goal["met"] else "no", found[name]["commit"])
            for name, goal in goals
        ],
    )
    for name, (title, columns) in TABLES.items():
        if name in found:
            _table(title, columns, [[row[column] for column in columns] for row in found[name]["rows"]])


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
