#!/usr/bin/env python3
"""What a decoded token takes where it selects anew (`--importance-renew`): time, and bytes off the disk.

SPEC's replies stay with the rows that their prompt selected. Here a reply may select again after each token, or after some. The same
requests are asked behind prefixes on a slow disk: with all rows, with SPEC's way, and with renewal after 1, 4 and 16 tokens, each with
chunk caches of its own, and renewal after each token twice. Bytes per token are what a reply reads beyond SPEC's way, which reads
nothing while it decodes.

SmolLM2-135M, where its package is installed, is asked about WikiText-2; the other model has random weights and heads of 64.

    python -m benchmarks.papers.spec.renew [--data DIR] [--quick] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from afterglow.bench.report import finish, show
from afterglow.errors import AfterglowError
from afterglow.library.locate import REAL, find_model
from afterglow.model.loader import load_model
from afterglow.store.extents.throttle import Throttle
from benchmarks.papers.spec.io import Bench, make_model
from benchmarks.papers.spec.io_variants import NEW, RETENTION, VARIANTS, WHOLE
from benchmarks.papers.spec.sweep import MODELS, REAL_NAME, arguments_with_data, wikitext

MB_PER_S = 500
_SPEC = VARIANTS[-1]
ONCE = "SPEC, the prompt's selection"
WAYS = [
    *(variant for variant in VARIANTS if variant.name == WHOLE),
    replace(_SPEC, name=ONCE),
    *(replace(_SPEC, name=f"anew after {renew}", renew=renew) for renew in (1, 4, 16)),
    replace(_SPEC, name="anew after 1, again", renew=1),
]

Row = dict[str, Any]


def main(args: Sequence[str] | None = None) -> int:
    """The command."""
    options = arguments_with_data("python -m benchmarks.papers.spec.renew", __doc__ or "").parse_args(args)
    tokens = 1024 if options.quick else 4096
    rows, skipped = measured("heads64", tokens, options), []
    try:
        rows += measured(REAL_NAME, tokens, options)
    except (AfterglowError, OSError) as error:
        skipped.append(f"{REAL}: {error}")
    show(
        f"a decoded token behind {tokens} tokens, {RETENTION:g} of them selected, a disk of {MB_PER_S} MB/s",
        ("model", "way", "TTFT, ms", "a token, ms", "of SPEC's way", "MB a token"),
        [(r["model"], r["variant"], r["ttft_ms"], r["token_ms"], r["token_ratio"], r["token_mb"]) for r in rows],
    )
    for line in skipped:
        print(f"skipped: {line}")
    about = {"tokens": tokens, "mb_per_s": MB_PER_S, "retention": RETENTION, "quick": options.quick or bool(skipped)}
    finish(options, rows, [], skipped=skipped, **about)
    return 0


def measured(name: str, tokens: int, options: Any) -> list[Row]:
    """Ask one model's requests in all ways. Raises: AfterglowError, OSError, where the model or its text is missing."""
    rng, reply = random.Random(options.seed), 9 if options.quick else 33
    with tempfile.TemporaryDirectory(prefix="afterglow-bench-") as folder:
        shape, text = MODELS["heads64"], None
        if name == REAL_NAME:
            model, text = find_model(REAL), iter(wikitext(options))
            spec = load_model(model).spec
            shape = replace(shape, head_dim=spec.head_dim, layers=spec.layers, heads=spec.heads, kv_heads=spec.kv_heads)
        else:
            model = make_model(Path(folder), shape, tokens + NEW + reply + 64, options.seed)
        bench = Bench(str(model), Path(folder), [tokens] * 3, None, shape, options, importance_renew=1)
        bench.reply, bench.cold = reply, True
        bench.window += reply
        work = bench.fill(rng, 2 if options.quick else 8, text)
        bench.prepare(work)
        with bench.engines(Throttle(read_bytes_per_s=1e6 * MB_PER_S, latency_s=1e-4)) as engines:
            rows = bench.compare(engines, work, WAYS)
    once = next(row for row in rows if row["variant"] == ONCE)
    return [
        {
            "model": name,
            **row,
            "reply": reply,
            "token_ratio": round(row["token_ms"] / once["token_ms"], 3),
            "token_mb": max(0.0, round((row["read_mb"] - once["read_mb"]) / (reply - 1), 3)) if _renews(row) else 0.0,
        }
        for row in rows
    ]


def _renews(row: Row) -> bool:
    return any(way.name == row["variant"] and way.renew for way in WAYS)


if __name__ == "__main__":
    sys.exit(main())
