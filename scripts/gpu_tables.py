"""`python -m scripts.gpu_tables`: write the tables of docs/gpu.md anew that are counted and measured without a GPU.

Needs Triton, whose kernels run in its interpreter. A region lies between the comments that `scripts.readme` knows, and names the module
that prints it.
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.common.paths import ROOT

from scripts.readme import REGION

PAGE = ROOT / "docs" / "gpu.md"


def printed(program: str) -> str:
    """Return what a module prints, with its arguments. Raises: CalledProcessError, if it fails."""
    ran = subprocess.run(
        [sys.executable, "-m", *program.split()],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return f"\n{ran.stdout.strip()}\n\n"


def made(page: str) -> str:
    """Make all regions of the page anew."""
    return REGION.sub(lambda region: region["head"] + printed(region["source"]), page)


if __name__ == "__main__":
    PAGE.write_text(made(PAGE.read_text("utf-8")), "utf-8")
