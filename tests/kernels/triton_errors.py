"""`python -m tests.kernels.triton_errors`: the largest errors of Triton's kernels against references in float64, as a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CHECKS = [
    "attention",
    "merges",
    "rows",
    "gather",
    "passes",
    "products",
    "blocks",
    "experts",
    "column_sums",
]


def errors() -> dict[str, tuple[float, float, float]]:
    """Return by kernel and dtype the error that came nearest to what is allowed, that, and the reference's largest number."""
    found: dict[str, tuple[float, float, float]] = {}
    for name in CHECKS:
        ran = subprocess.run(
            [sys.executable, "-m", "tests.kernels.triton_checks", name],
            cwd=Path(__file__).parents[2], env={**os.environ, "TRITON_INTERPRET": "1"},
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        found |= json.loads(ran.stdout)
    return found


if __name__ == "__main__":
    print("| kernel | numbers | largest error | allowed | largest number |\n|---|---|---|---|---|")
    for name, numbers in errors().items():
        print(f"| {name} | {' | '.join(f'{number:.1e}' for number in numbers)} |")
