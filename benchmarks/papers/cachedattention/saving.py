"""Asynchronous saving: Figure 20 of CachedAttention, and whether saved rows equal computed ones.

A long prompt, 20 decoded tokens, and another request that waits meanwhile. All rows go to host memory and through to the
disk of this machine, or (off) nothing is saved at all; and as in the paper's baseline (Figure 8a) the other request
waits until all is saved. The variants take turns in one engine; "off" takes part twice, to tell what a repeat differs by.

    python -m benchmarks.papers.cachedattention.saving [--quick] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from afterglow.bench.report import COUNTED, arguments, finish, goal, show, spread
from afterglow.bench.timed_requests import ask, asked, words
from afterglow.config import BLOCK_ROWS
from afterglow.engine.engine import Engine
from benchmarks.common.engines import engine_of

MODEL = "bench-100m"
LENGTHS = (1024, 1280, 1600)  # tokens of the prompt; the paper's are 1K to 1.6K
DECODED = 20
NEXT = 256  # tokens of the request that waits
OFF, AGAIN, ON, WAITING = "off", "off again", "on", "on, awaited"
NOISE = 0.03  # a run whose repeats differ by more shows nothing, and a goal that it misses counts as missed
VARIANTS = (OFF, ON, AGAIN, WAITING)
MEASURES = {"ttft": "first token", "decode": "per decoded token", "next": "next job's first token", "all": "both jobs"}

Times = dict[str, list[float]]


def main(args: list[str]) -> int:
    options = arguments("python -m benchmarks.papers.cachedattention.saving", __doc__ or "").parse_args(args)
    rng = random.Random(options.seed)
    cache = {"source": "load", "write_policy": "write_through"}
    rows = []
    with engine_of(MODEL, threads=options.threads, max_batch=1, cache=cache) as engine:
        _round(engine, rng, LENGTHS[-1], ON)
        for length in LENGTHS:
            rows += _rows(length, _measured(engine, rng, length, 4 if options.quick else 12))
        written = engine.stats().store.disk_write_bytes
    reloaded = _reloaded(rng, options.threads)
    for m, what in MEASURES.items():
        show(
            f"{what}, ms: {MODEL}, {DECODED} tokens decoded, then a request of {NEXT}",
            ("prompt", *(name for name in VARIANTS), *(f"{name} / off" for name in VARIANTS[1:])),
            [
                (length, *(f"{r[f'{m}_ms']:.1f}" for r in of), *(f"{r[f'{m}_ratio']:.3f}" for r in of[1:]))
                for length in LENGTHS
                if (of := [r for r in rows if r["prompt"] == length])
            ],
        )
    show("rows saved and loaded by another engine", ("", ""), list(reloaded.items()))
    goals = [
        goal(
            f"{MEASURES[m]}, prompt of {r['prompt']}: on / off",
            r[f"{m}_ratio"],
            1.03,
            least=False,
            spread=r[f"{m}_a_a"],
        )
        for m in ("decode", "next")
        for r in rows
        if r["saving"] == ON
    ]
    goals.append(goal("bytes that differ after reload", reloaded["bytes_that_differ"], 0, least=False, spread=COUNTED))
    worst = reloaded["to_recomputed"] / 1e-4
    goals.append(goal("largest difference to recomputed rows, 1e-4", worst, 1, least=False, spread=COUNTED))
    finish(options, rows, goals, reloaded=reloaded, disk_write_bytes=written, decoded=DECODED, next=NEXT)
    return 0


# ------------------------------------------------------------------------------------------------------- times


def _measured(engine: Engine, rng: random.Random, length: int, repeats: int) -> dict[str, Times]:
    """Samples of each measure, in seconds, by variant; the n-th of all variants were taken one after another."""
    found: dict[str, Times] = {name: {m: [] for m in MEASURES} for name in VARIANTS}
    for n in range(repeats + 1):
        for name in VARIANTS if n % 2 else reversed(VARIANTS):  # the first has no advantage
            sample = _round(engine, rng, length, name)
            if n:
                for m, seconds in sample.items():
                    found[name][m].append(seconds)
    return found


def _round(engine: Engine, rng: random.Random, length: int, variant: str) -> dict[str, float]:
    """A request of `length` tokens and the next one; afterwards nothing is left of either."""
    saving = variant in (ON, WAITING)
    before = engine.stats().store.disk_write_bytes
    prompt, following = words(rng, engine, length), words(rng, engine, NEXT)
    first = ask(engine, prompt, DECODED, reuse=saving)
    if variant == WAITING:
        first.ended.wait()
        engine.settle()
    then = ask(engine, following, reuse=saving)
    then.ended.wait()
    first.ended.wait()
    engine.settle()
    written = engine.stats().store.disk_write_bytes - before
    if (written > 0) != saving:
        raise RuntimeError(f"{variant}: {written} bytes were written to disk")
    engine.reset_cache()
    engine.settle()
    return {
        "ttft": first.ttft,
        "decode": (first.last - first.first) / (DECODED - 1),
        "next": then.first - first.last,
        "all": then.last - first.asked,
    }


def _rows(length: int, found: dict[str, Times]) -> list[dict[str, Any]]:
    """A row for each variant: medians, and medians of the ratios to the "off" of the same round. `a_a`: how far the
    median ratio of "off again" is from 1, plus what a single one differs by over the root of their number."""
    rows = []
    for name, times in found.items():
        row: dict[str, Any] = {"prompt": length, "saving": name}
        for m, samples in times.items():
            ratios, twice = ([a / b for a, b in zip(s, found[OFF][m], strict=True)] for s in (samples, found[AGAIN][m]))
            row[f"{m}_ms"] = round(statistics.median(samples) * 1e3, 2)
            row[f"{m}_ratio"] = round(statistics.median(ratios), 4)
            noise = spread(twice) / len(twice) ** 0.5
            row[f"{m}_a_a"] = round(abs(statistics.median(twice) - 1) + noise, 4)
            row[f"{m}_spread"] = round(spread(samples), 4)
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------------------- bytes


def _reloaded(rng: random.Random, threads: int | None) -> dict[str, float]:
    """What one engine has computed and saved, as another finds it on disk, and as that one computes it again."""
    with tempfile.TemporaryDirectory(prefix="afterglow-bench-") as folder:
        cache = {"cache_dir": Path(folder), "source": "load", "write_policy": "write_through"}
        with engine_of(MODEL, threads=threads, cache=cache) as engine:
            prompt = words(rng, engine, LENGTHS[0])
            text = [*prompt, *asked(engine, prompt, DECODED).tokens]
            engine.settle()
            saved = _saved_rows(engine, text)
        with engine_of(MODEL, threads=threads, cache=cache) as engine:
            turn = asked(engine, text)
            if turn.cached.disk != len(text) - 1:
                raise RuntimeError(f"not all rows were loaded: {turn.cached}")
            engine.settle()
            loaded = _saved_rows(engine, text)
            engine.reset_cache()
            engine.settle()
            asked(engine, text)
            engine.settle()
            again = _saved_rows(engine, text)[:, :, : saved.shape[2]]
    return {
        "rows": saved.shape[2],
        "bytes": saved.nbytes,
        "bytes_that_differ": int((saved != loaded[:, :, : saved.shape[2]]).sum()),
        "to_recomputed": float(np.abs(saved.view(np.float32) - again.view(np.float32)).max()),
    }


def _saved_rows(engine: Engine, text: list[int]) -> npt.NDArray[np.uint8]:
    """What lies in host memory of a text: uint8 [layers, 2, rows, row bytes], a copy."""
    tokens = np.array(text, np.uint32).tobytes()
    found = []
    for view in engine.parts.scheduler.cache.index.match("", tokens).views:
        blocks = engine.parts.store.arena.rows[:, :, list(view.extent.slots)]
        assert blocks.shape[2] * BLOCK_ROWS >= view.stop, "it is not in host memory"
        found.append(blocks.reshape(*blocks.shape[:2], -1, blocks.shape[-1])[:, :, view.start : view.stop])
    return np.concatenate(found, axis=2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
