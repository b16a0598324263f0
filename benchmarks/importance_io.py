#!/usr/bin/env python3
"""SPEC's I/O: figures 16, 17, 18, 20 and 21, and an ablation of its prefetching, which the paper does not have.

Requests over long prefixes that are on disk, with chunk caches that hold 17.5 % of the data on the device and 56 % in host
(SPEC §V-A). The disk is made slow, so that reading a whole prefix takes ten times as long as computing a request over it;
its bytes are real and pass by the page cache. Models are of random weights; what their layers find important comes from the
bundled model (`importance_parts/traces.py`), the work of finding it out is done all the same.

Variants, each with the same requests after the same warm-up: recompute; load everything (host memory of both caches' size,
LRU; AttentionStore without hints); all keys and important values (H2O) with LRU and with LFU; and SPEC step by step: probe
heads (+ITF), rows in order of importance (+RO), caches by score (+SC), the next layer guessed (+SP).

    python benchmarks/importance_io.py [--quick] [--json FILE] [--shape opt|llama] [--real-disk]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("COLUMNS", "132")

import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from afterglow.bench.report import arguments, finish, goal, show
from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.engine.important import Important, Taking
from afterglow.importance.identify import Selection, all_sums, fall_back, judge, probe_sums
from afterglow.importance.prior import Prior, Tally
from afterglow.importance.shelf import Shelf
from afterglow.model.presets import save_hf
from afterglow.model.spec import ModelSpec, RopeSpec
from afterglow.plan.score import ScoreCache
from afterglow.plan.step import Selectable
from afterglow.store.throttle import Throttle
from asking import asked, words
from importance_parts.traces import Recorded, record, stretched

LAYERS, HIDDEN, HEADS, HEAD_DIM = 8, 512, 8, 64
WINDOW = 12288
RETENTION = 0.25
DEVICE, HOST = 0.175, 0.56  # shares of the data that the caches hold
NEW = 32  # tokens that come with a request
RATIO = 10.0  # reading a whole prefix, over computing a request over it

Kind = Literal["recompute", "all", "keys", "probes"]


@dataclass(frozen=True)
class Variant:
    """`keys`: all keys are read, and important values; `probes`: probe heads' keys first."""

    name: str
    kind: Kind
    policy: str = "lfu"
    reorder: bool = False
    prior: Prior = "none"


VARIANTS = [
    Variant("recompute", "recompute"),
    Variant("load everything, LRU", "all"),
    Variant("H2O, LRU", "keys", "lru"),
    Variant("H2O, LFU", "keys", "lfu"),
    Variant("+ITF", "probes", "lfu"),
    Variant("+ITF +RO", "probes", "lfu", True),
    Variant("+ITF +RO +SC", "probes", "score", True),
    Variant("+ITF +RO +SC +SP", "probes", "score", True, "prior"),
]
PRIORS = [Variant(f"SPEC, guessing by {prior}", "probes", "score", True, prior) for prior in ("cut", "random", "sinks")]
BASE, SPEC = "H2O, LFU", "+ITF +RO +SC +SP"


class Traced(Important):
    """Layers find important what a trace says, after the work of finding something out."""

    def __init__(self, real: Important) -> None:
        super().__init__(real.decoder, real.loader, real.rules)
        self.sums: list[Tensor] = []

    def begin(self, selectable: tuple[Selectable, ...], retention: float | None, exact: int = 0) -> Taking:
        taking = super().begin(selectable, retention, exact)
        return TracedTaking(self, taking.prefix, taking.rules)


class TracedTaking(Taking):
    """One request of a trace."""

    def _select(self, layer: int, q: Tensor, own: Tensor, scale: float) -> tuple[Selection, Tensor | None]:
        shared, rules = self.shared, self.rules
        assert isinstance(shared, Traced)
        k = rules.keep(self.prefix.rows)
        assert k is not None
        stats, traced = shared.loader.stats, shared.sums[layer][:, : self.prefix.rows]
        probe_keys = self._rotate(self.prefix.probe_keys(layer), None)
        began = time.perf_counter()
        voted = probe_sums(shared.probes, q, probe_keys, own, scale=scale)
        verdict = judge(traced[: len(voted)], k, rules)
        stats.identifying += time.perf_counter() - began
        if verdict.selection is not None:
            return verdict.selection, None
        keys = self._rotate(self.prefix.all_keys(layer), None)
        began = time.perf_counter()
        all_sums(shared.probes, voted, q, keys, own, scale=scale)
        found = fall_back(traced, k, rules, verdict)
        stats.identifying += time.perf_counter() - began
        return found, keys


@dataclass
class Work:
    """Prefixes, and requests over them in order: (prefix, request number, new tokens)."""

    prefixes: list[list[int]]
    warm: list[tuple[int, int, list[int]]]
    judged: list[tuple[int, int, list[int]]]


def main(args: list[str]) -> int:
    parser = arguments("importance_io", __doc__ or "")
    parser.add_argument("--shape", choices=("opt", "llama"), default="llama", help="the model's shape (default llama)")
    parser.add_argument("--real-disk", action="store_true", help="the disk as it is")
    options = parser.parse_args(args)
    count, lengths, requests = (4, (2048, 4096), 8) if options.quick else (8, (4096, 10240), 24)
    rng = random.Random(options.seed)
    recorded = record(count, 1500, options.seed)
    with tempfile.TemporaryDirectory(prefix="afterglow-bench-") as folder:
        model = Path(folder) / "model"
        _make(model, options.shape, options.seed)
        sizes = [rng.randrange(lengths[0], lengths[1] + 1) // 64 * 64 for _ in range(count)]
        bench = Bench(model, Path(folder) / "cache", sizes, recorded, options)
        work = bench.fill(rng, requests)
        throttle, computing = bench.speed(work, rng)
        rows = []
        for variant in (*VARIANTS, *PRIORS):
            rows.append(bench.measure(variant, work, throttle))
            print(f"{variant.name}: TTFT {rows[-1]['ttft_ms']:.0f} ms", flush=True)
    _report(rows, sizes, throttle, computing, options)
    return 0


def _make(folder: Path, shape: str, seed: int) -> None:
    if shape == "llama":
        rope = RopeSpec(dim=HEAD_DIM, base=10000.0)
        sizes = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "kv_heads": HEADS, "head_dim": HEAD_DIM}
        save_hf(
            ModelSpec(family="llama", ffn=1408, vocab=2048, max_positions=WINDOW, rope=rope, eos_ids=(2,), **sizes),
            folder,
            seed=seed,
        )
        return
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(seed)
    config = OPTConfig(
        vocab_size=2048, hidden_size=HIDDEN, num_hidden_layers=LAYERS, ffn_dim=4 * HIDDEN, num_attention_heads=HEADS,
        max_position_embeddings=WINDOW, word_embed_proj_dim=HIDDEN,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(folder)


class Bench:
    """One model, its cache folder, and what is asked of it."""

    def __init__(self, model: Path, cache: Path, sizes: list[int], recorded: list[Recorded], options: Any) -> None:
        self.model, self.cache, self.sizes, self.recorded, self.options = model, cache, sizes, recorded, options
        self.row_bytes = LAYERS * 2 * HIDDEN * 4
        self.data = sum(sizes) * self.row_bytes

    @contextlib.contextmanager
    def engine(self, host: int, throttle: Throttle | None = None, **cache: Any) -> Iterator[Engine]:
        """One that goes on with the same folder."""
        tiers = CacheConfig(
            device_cache=2 * (WINDOW + 512) * self.row_bytes,
            host_cache=host,
            disk_cache=4 * self.data + 2**30,
            cache_dir=self.cache,
            warm_start=False,
            **{"source": "load", "policy": "lru", **cache},
        )
        config = EngineConfig(
            cache=tiers, threads=self.options.threads, importance=1.0, importance_share=0.0, importance_exact="never",
            reorder_interval=0.0, max_batch=1,
        )  # fmt: skip
        engine = Engine.load(self.model, config, throttle=throttle)
        engine.start()
        try:
            yield engine
        finally:
            engine.close()

    def fill(self, rng: random.Random, requests: int) -> Work:
        """Compute the prefixes, and leave them on disk."""
        with self.engine(2 * self.data) as engine:
            prefixes = [words(rng, engine, size) for size in self.sizes]
            for prefix in prefixes:
                asked(engine, prefix)
                engine.settle()
            middle, spread = (len(prefixes) - 1) / 2, len(prefixes) / 4

            def draw(number: int) -> tuple[int, int, list[int]]:
                at = min(
                    len(prefixes) - 1, max(0, round(rng.gauss(middle, spread)))
                )  # reuse is normal, as in the paper
                return at, number, words(rng, engine, NEW)

            return Work(prefixes, [draw(n) for n in range(requests)], [draw(n) for n in range(requests, 2 * requests)])

    def speed(self, work: Work, rng: random.Random) -> tuple[Throttle | None, float]:
        """How slow the disk is to be, and what computing a request over a prefix takes, in seconds."""
        at = self.sizes.index(sorted(self.sizes)[len(self.sizes) // 2])
        with self.engine(2 * self.data) as engine:
            asked(engine, work.prefixes[at])
            engine.demote("host")
            times = []
            for _ in range(5):
                times.append(asked(engine, [*work.prefixes[at], *words(rng, engine, NEW)]).ttft)
                engine.demote("host")
            computing = statistics.median(times)
        whole = self.sizes[at] * self.row_bytes
        rate = whole / (RATIO * computing)
        return (None if self.options.real_disk else Throttle(read_bytes_per_s=rate, latency_s=1e-4)), computing

    def measure(self, variant: Variant, work: Work, throttle: Throttle | None) -> dict[str, Any]:
        """One variant: a warm-up, then the requests that count."""
        both = int((DEVICE + HOST) * self.data)
        least = 64 * self.row_bytes * 24
        with self.engine(max(both, least) if variant.kind == "all" else least, throttle) as engine:
            important = engine._parts.important
            assert important is not None
            traced = Traced(important)
            traced.rules = replace(traced.rules, force="fallback" if variant.kind == "keys" else "no")
            engine._runner._important = traced  # type: ignore[attr-defined]
            loader = traced.loader
            device, host = int(DEVICE * self.data), int(HOST * self.data)
            loader.shelf = Shelf(ScoreCache(device, host, variant.policy), torch.device("cpu"))
            loader.prior = variant.prior
            few = work.warm[:3] if variant.kind == "recompute" else work.warm
            for request in few:
                self._ask(engine, variant, traced, work, request)
            if variant.reorder:
                engine._on_thread(loader.reorder)
                engine.settle()
            for request in few:  # of rewritten extents nothing is cached
                self._ask(engine, variant, traced, work, request)
            loader.stats.tally = Tally()
            before = replace(loader.stats)
            disk = engine.stats().store
            assert disk is not None
            read = disk.disk_read_bytes + disk.chunk_read_bytes
            judged = work.judged[:3] if variant.kind == "recompute" else work.judged
            places = dict(loader.shelf.cache.rows)
            times = [self._ask(engine, variant, traced, work, request) for request in judged]
            after, disk = loader.stats, engine.stats().store
            assert disk is not None
            now = loader.shelf.cache.rows
            wanted = max(1, sum(now.values()) - sum(places.values()))
        tally = after.tally
        return {
            "variant": variant.name,
            "requests": len(times),
            "ttft_ms": round(1e3 * statistics.mean(times), 1),
            "p99_ms": round(1e3 * max(times), 1),
            "wait_ms": round(1e3 * (after.waited - before.waited) / len(times), 1),
            "read_mb": round((disk.disk_read_bytes + disk.chunk_read_bytes - read) / 1e6 / len(times), 1),
            "device_hits": round((now["device"] - places["device"]) / wanted, 3),
            "host_hits": round((now["host"] - places["host"]) / wanted, 3),
            "fallback_layers": round((after.fallbacks - before.fallbacks) / max(1, after.layers - before.layers), 3),
            "identifying": round((after.identifying - before.identifying) / sum(times), 4),
            "mapping": round((after.mapping - before.mapping) / sum(times), 4),
            "recall": round(tally.recall, 3),
            "precision": round(tally.precision, 3),
            "hidden": round(tally.hit / max(1, tally.used + tally.missing), 3),
        }

    def _ask(
        self, engine: Engine, variant: Variant, traced: Traced, work: Work, request: tuple[int, int, list[int]]
    ) -> float:
        at, number, new = request
        prompt = [*work.prefixes[at], *new]
        if variant.kind == "recompute":
            return asked(engine, prompt, reuse=False).ttft
        if variant.kind == "all":
            return asked(engine, prompt, kv_retention=1.0).ttft
        traced.sums = stretched(self.recorded[at], number, LAYERS, HEADS, self.sizes[at], at)
        return asked(engine, prompt, kv_retention=RETENTION).ttft


def _report(
    rows: list[dict[str, Any]], sizes: list[int], throttle: Throttle | None, computing: float, options: Any
) -> None:
    rate = "the disk as it is" if throttle is None else f"a disk of {throttle.read_bytes_per_s / 1e6:.0f} MB/s"
    show(
        f"{options.shape} shape, {len(sizes)} prefixes of {min(sizes)} to {max(sizes)} tokens, {NEW} new ones (computed in"
        f" {1e3 * computing:.0f} ms), retention {RETENTION:g}, {rate}",
        ("variant", "TTFT ms", "slowest", "waits ms", "MB read", "on device", "in host", "fall back", "identify", "recall",
         "precision", "hidden"),
        [
            (r["variant"], f"{r['ttft_ms']:.0f}", f"{r['p99_ms']:.0f}", f"{r['wait_ms']:.0f}", f"{r['read_mb']:.1f}",
             *(f"{100 * r[name]:.0f} %" for name in ("device_hits", "host_hits", "fallback_layers", "identifying")),
             *(f"{100 * r[name]:.0f} %" for name in ("recall", "precision", "hidden")))
            for r in rows
        ],
    )  # fmt: skip
    by_name = {row["variant"]: row for row in rows}
    base, spec = by_name[BASE], by_name[SPEC]
    ladder = [by_name[variant.name] for variant in VARIANTS[3:]]
    goals = [
        goal("TTFT, H2O with LFU over SPEC", base["ttft_ms"] / spec["ttft_ms"], 1.2, least=True),
        goal("waiting for I/O, H2O with LFU over SPEC", base["wait_ms"] / max(0.1, spec["wait_ms"]), 1.5, least=True),
        goal("identification, share of TTFT", spec["identifying"], 0.06, least=False),
        goal("mapping, share of TTFT", spec["mapping"], 0.02, least=False),
        goal(
            "recall of guesses over random ones",
            spec["recall"] / max(0.001, by_name[PRIORS[1].name]["recall"]),
            1,
            least=True,
        ),
        *(
            goal(
                f"{after['variant']}: TTFT over the step before",
                after["ttft_ms"] / before["ttft_ms"],
                1.0,
                least=False,
                tolerance=0.02,
            )
            for before, after in zip(ladder, ladder[1:], strict=False)
        ),
    ]
    finish(
        options.json, options.seed, rows, goals, shape=options.shape, sizes=sizes, retention=RETENTION,
        disk_bytes_per_s=None if throttle is None else throttle.read_bytes_per_s, computing_s=computing,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
