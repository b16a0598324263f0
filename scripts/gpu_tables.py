"""`python -m scripts.gpu_tables [PART ...]`: write the tables of docs/gpu.md anew that are counted and measured without a GPU.

Needs Triton, whose kernels run in its interpreter. A region lies between the comments that `scripts.readme` knows, and names the module
that prints it: parts of these names choose tables. That of `tests.device.mutations` takes half an hour, the others four minutes together.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

from benchmarks.common.paths import ROOT

from scripts.readme import REGION

PAGE = ROOT / "docs" / "gpu.md"
INTERPRETED = {"tests.device.counts": {"TRITON_INTERPRET": "1"}}  # others choose by themselves


def printed(program: str) -> str:
    """Return what a module prints, with its arguments. Raises: CalledProcessError, if it fails."""
    ran = subprocess.run(
        [sys.executable, "-m", *program.split()],
        cwd=ROOT, env=os.environ | INTERPRETED.get(program, {}), check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return f"\n{ran.stdout.strip()}\n\n"


def made(page: str, *wanted: str) -> str:
    """Make regions of the page anew: those whose sources have a part of these in their names; none: all."""

    def text(region: re.Match[str]) -> str:
        chosen = not wanted or any(part in region["source"] for part in wanted)
        return region["head"] + (printed(region["source"]) if chosen else region["text"])

    return REGION.sub(text, page)


if __name__ == "__main__":
    PAGE.write_text(made(PAGE.read_text("utf-8"), *sys.argv[1:]), "utf-8")
