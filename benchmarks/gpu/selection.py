"""SPEC's figures 16 and 18 with OPT-6.7B's shape: requests over long prefixes on disk, answered with their important rows.

The variants, caches and requests are those of `benchmarks.papers.spec.io`, on the device, and the disk is as fast as the paper's. Models of random
weights find nothing important: layers select what a small model has found, after the work of finding it.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import tempfile
from pathlib import Path

from afterglow.bench.report import goal
from afterglow.store.extents.throttle import Throttle
from benchmarks.gpu.models import random_preset, shape_of
from benchmarks.gpu.setting import DEVICE, Ceilings, Found, Setting, table
from benchmarks.papers.spec.io import Bench
from benchmarks.papers.spec.io_variants import AGAIN, BASE, NEW, SPEC, WHOLE, Shape
from benchmarks.papers.spec.traces import record

MODEL = "OPT-6.7B"
DISK = 5e9  # bytes/s, the paper's (§V-A)
WANTED = 1.2  # of the best of the others' times to the first token, as in figure 16 at least


class DeviceBench(Bench):
    device = DEVICE


def selection(setting: Setting, ceilings: Ceilings) -> Found:
    """Time the first token of requests over prefixes of 4K to 5.5K tokens: computed, loaded whole, and selected step by step."""
    count, (shortest, longest), requests = setting.of((3, (4096, 5632), 8), (2, (256, 320), 2))
    rng = random.Random(setting.seed)
    sizes = [rng.randrange(shortest, longest + 1) // 64 * 64 for _ in range(count)]
    full = shape_of(MODEL, setting)
    model = dataclasses.replace(
        full, window=max(sizes) + NEW + 64
    )  # as in the paper, whose prefixes are longer than OPT's positions
    shape = Shape(
        head_dim=model.head_dim, ffn=model.ffn, lengths=(shortest, longest), device=0.175, host=0.56, count=count, priors=(),
        layers=model.layers, heads=model.heads, number_bytes=2,
    )  # fmt: skip
    recorded = record(count, setting.of(1500, 300), setting.seed)
    with tempfile.TemporaryDirectory(prefix="afterglow-bench-") as folder, random_preset(model, setting.seed) as name:
        options = argparse.Namespace(threads=None, real_disk=False)
        bench = DeviceBench(name, Path(folder), sizes, recorded, shape, options, device="cuda", dtype="bfloat16")
        found = bench.measure(bench.fill(rng, requests), Throttle(read_bytes_per_s=DISK, latency_s=1e-4))
    rows = [{name: row[name] for name in SHOWN} for row in found]
    table(
        f"{model.name}, {count} prefixes of {min(sizes)} to {max(sizes)} tokens on disk, {NEW} new ones (Fig. 16, 18)",
        rows,
    )
    times = {row["variant"]: float(row["ttft_ms"]) for row in rows}
    spread = abs(times[AGAIN.name] / times[SPEC] - 1)
    best = min(times[name] for name in ("recompute", WHOLE, BASE))
    return Found(
        rows,
        []
        if setting.tiny
        else [goal("best of the others : SPEC", best / times[SPEC], WANTED, least=True, spread=spread)],
    )


SHOWN = (
    "variant",
    "requests",
    "ttft_ms",
    "p99_ms",
    "wait_ms",
    "read_mb",
    "device_hits",
    "host_hits",
    "fallback_layers",
    "identifying",
)
