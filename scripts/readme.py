"""What the documents print, made from its source: `python -m scripts.readme --check` compares, `--write` writes.

A region lies between two comments, and the first one names its source:

    <!-- generated: KIND: SOURCE -->
    ...
    <!-- end of generated -->

Kinds: `command` is an `afterglow` command line with what it prints, `table` a table of `benchmarks/readme_tables.py`, made of
a file of `benchmarks/results`, `papers` one of `benchmarks/papers/page_tables.py`, `reference` one of `scripts/reference.py`. Another kind is another function in `KINDS`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.common.paths import ROOT
from benchmarks.papers import page_tables
from benchmarks.readme_tables import table

from scripts.reference import reference

DOCUMENTS = ("README.md", "docs/compare.md", "docs/papers.md", "docs/reference.md")
REGION = re.compile(
    r"(?P<head><!-- generated: (?P<kind>\w+): (?P<source>.+?) -->\n)(?P<text>.*?)(?=<!-- end of generated -->)",
    re.DOTALL,
)


class Stale(NamedTuple):
    """A region that is not what its source says now."""

    document: str
    kind: str
    source: str
    difference: str


def command(source: str) -> str:
    """A command and what it prints, as a terminal shows it."""
    name, *args = shlex.split(source)
    if name != "afterglow":
        raise ValueError(f"only afterglow's own commands are run, got {source!r}")
    ran = subprocess.run(
        [sys.executable, "-m", "afterglow.cli", *args],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1"},
    )
    lines = "\n".join(line.rstrip() for line in ran.stdout.rstrip().splitlines())
    return f"```\n$ {source}\n{lines}\n```\n"


KINDS: dict[str, Callable[[str], str]] = {
    "command": command,
    "table": lambda name: f"\n{table(name)}\n",
    "papers": lambda name: f"\n{page_tables.table(name)}\n",
    "reference": lambda name: f"\n{reference(name)}\n",
}


def regenerate(text: str) -> str:
    """Make all regions of a document anew. Raises: ValueError for an unknown kind."""

    def made(region: re.Match[str]) -> str:
        if region["kind"] not in KINDS:
            raise ValueError(f"no generated text of kind {region['kind']!r}; there are {', '.join(KINDS)}")
        return region["head"] + KINDS[region["kind"]](region["source"])

    return REGION.sub(made, text)


def stale(document: str, text: str) -> list[Stale]:
    """The regions that differ from what their sources say now."""
    found = []
    for old, new in zip(REGION.finditer(text), REGION.finditer(regenerate(text)), strict=True):
        if old["text"] != new["text"]:
            lines = difflib.unified_diff(
                old["text"].splitlines(), new["text"].splitlines(), "printed", "now", lineterm=""
            )
            found.append(Stale(document, old["kind"], old["source"], "\n".join(lines)))
    return found


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="name stale regions; exit code 1 if there are any")
    what.add_argument("--write", action="store_true", help="write stale regions anew")
    chosen = parser.parse_args(args)
    count = 0
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text("utf-8")
        if chosen.write:
            path.write_text(regenerate(text), "utf-8")
            continue
        for region in stale(name, text):
            count += 1
            print(f"{region.document}: {region.kind}: {region.source}\n{region.difference}\n")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
