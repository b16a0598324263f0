"""Draws docs/images/*.svg from benchmarks/results/*.json, and from nothing else; `peers` also fills docs/compare.md's tables.

pip install -c constraints.txt -e '.[plots]' && python -m benchmarks.plots [NAME ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.common.paths import IMAGES
from benchmarks.plots import cachedattention, measured, operators, peers, sim_speed

PLOTS = {
    "measured": measured.main,
    "cachedattention": cachedattention.main,
    "operators": operators.main,
    "sim_speed": sim_speed.main,
    "peers": peers.main,
}


def main(args: Sequence[str] | None = None) -> None:
    """Draw the named plots, all by default."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PLOTS)} (default: all)")
    chosen = parser.parse_args(args)
    if unknown := [name for name in chosen.names if name not in PLOTS]:
        parser.error(f"{', '.join(unknown)}: not among {', '.join(PLOTS)}")
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in chosen.names or PLOTS:
        PLOTS[name]()


if __name__ == "__main__":
    main()
