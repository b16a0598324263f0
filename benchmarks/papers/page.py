#!/usr/bin/env python3
"""Writes the tables of docs/papers.md anew from the files of benchmarks/results. Each lies between two comments that name it; what is
between tables is written by hand.

    python -m benchmarks.papers.page [--check]    # --check: name stale tables, and write nothing
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from scripts.readme import regenerate, stale

from benchmarks.common.paths import ROOT

PAGE = "docs/papers.md"


def main(args: Sequence[str] | None = None) -> int:
    """Run the command. The exit code of --check is 1 where a table is stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="name stale tables; exit code 1 if there are any")
    path = ROOT / PAGE
    text = path.read_text("utf-8")
    found = stale(PAGE, text)
    for region in found:
        print(f"{region.source}\n{region.difference}\n")
    if parser.parse_args(args).check:
        return 1 if found else 0
    path.write_text(regenerate(text), "utf-8")
    print(f"{PAGE}: {len(found)} tables were written anew")
    return 0


if __name__ == "__main__":
    sys.exit(main())
