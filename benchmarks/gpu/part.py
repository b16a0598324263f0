"""`python -m benchmarks.gpu.part NAME FILE [--shape tiny]`: one part, in this process; its result goes to FILE at the end."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from afterglow.bench.report import commit, verdict
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.setting import Ceilings, Found, Setting, about


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.part", description=__doc__)
    parser.add_argument("name", choices=list(PARTS))
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", choices=("full", "tiny"), default="full")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(args)
    run(options.name, options.file, Setting(options.shape == "tiny", options.seed))
    return 0


def run(name: str, file: Path, setting: Setting) -> None:
    """Run a part, print what it finds, and write it, all or nothing."""
    began = time.time()
    part = PARTS[name]
    ceilings = Ceilings.measured(setting)
    torch.cuda.empty_cache()  # 6 GiB, which another process may want: vLLM's engine
    ceilings.show()
    function = getattr(importlib.import_module(f"benchmarks.gpu.{part.module}"), part.function)
    found: Found = function(setting, ceilings, *part.arguments)
    if found.note:
        print(found.note)
    for each in found.goals:
        print(f"{each['name']}: {each['value']:.3g}, wanted {each['goal']}: {verdict(each)}")
    facts = {"part": name, "commit": commit(), **about(setting, ceilings), "seconds": round(time.time() - began, 1)}
    text = json.dumps({**facts, **found._asdict()}, indent=1, allow_nan=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".part")
    unfinished.write_text(text + "\n")
    unfinished.replace(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
