#!/usr/bin/env python3
"""SPEC's I/O: figures 16, 17, 18, 20 and 21, and an ablation of its prefetching, which the paper does not have.

Requests over long prefixes that are on disk, with chunk caches that hold 17.5 % of the data on the device and 56 % in host
(SPEC §V-A). The disk is made slow, so that reading a whole prefix takes ten times as long as computing a request over it;
its bytes are real and pass by the page cache. Models are of random weights, with 32 narrow heads a layer: three probe heads are
the part of all keys that they are in OPT-6.7B. What their layers find important comes from the bundled model
(`importance_parts/traces.py`); the work of finding it out is done all the same.

Variants, after the same warm-up in which every prefix is asked about: recompute; load everything (AttentionStore without
hints: LRU in host, and a context on the device); all keys and important values (H2O) with LRU and with LFU; and SPEC step by
step: probe heads (+ITF), rows in order of importance (+RO), caches by score (+SC), the next layer guessed (+SP). Each request is
asked of all variants, one after the other, before the next one is, and of SPEC twice: what these two differ by is the spread
that goals are judged within. Of requests alone, as few as here, the p99 is the slowest.

With --json, what FILE holds of other shapes and disks stays in it.

    python benchmarks/importance_io.py [--quick] [--json FILE] [--shape opt|llama] [--real-disk]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("COLUMNS", "132")

import contextlib
import gc
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from afterglow.bench.report import COUNTED, arguments, finish, goal, show
from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.engine.important import Important, Taking
from afterglow.importance.accounting import Layer
from afterglow.importance.identify import Selection, all_sums, fall_back, judge, probe_sums
from afterglow.importance.loader import Loader, LoaderStats
from afterglow.importance.prefix import Waits
from afterglow.importance.prior import Prior
from afterglow.importance.shelf import Shelf
from afterglow.model.presets import save_hf
from afterglow.model.spec import ModelSpec, RopeSpec
from afterglow.plan.score import ScoreCache
from afterglow.plan.step import Selectable
from afterglow.store.throttle import Throttle
from asking import asked, words
from importance_parts.traces import Recorded, record, stretched

LAYERS, HIDDEN, HEADS, HEAD_DIM = 8, 512, 32, 16
WINDOW = 12288
RETENTION = 0.25
DEVICE, HOST = 0.175, 0.56  # shares of the data that the caches hold
NEW = 32  # tokens that come with a request
RECOMPUTED = 3  # requests that are computed without any cache
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
    Variant("+ITF +RO +SC +SP", "probes", "score", True, "cut"),
]
PRIORS = [
    Variant(f"SPEC, guessing by {prior}", "probes", "score", True, prior) for prior in ("prior", "random", "sinks")
]
BASE, SPEC = "H2O, LFU", "+ITF +RO +SC +SP"
AGAIN = replace(VARIANTS[-1], name="the same again")


class Traced(Important):
    """Layers find important what a trace says, after the work of finding something out."""

    def __init__(self, real: Important) -> None:
        super().__init__(real.decoder, real.loader, real.rules, real.renew)
        self.sums: list[Tensor] = []

    def begin(self, selectable: tuple[Selectable, ...], retention: float | None, exact: int = 0) -> Taking:
        taking = super().begin(selectable, retention, exact)
        return TracedTaking(self, taking.prefix, taking.rules)


class TracedTaking(Taking):
    """One request of a trace."""

    def _select(
        self, layer: int, q: Tensor, own: Tensor, scale: float
    ) -> Waits[tuple[Selection, Tensor | None, Tensor | None]]:
        shared, rules = self.shared, self.rules
        assert isinstance(shared, Traced)
        k = rules.keep(self.prefix.rows)
        assert k is not None
        stats, traced = shared.loader.stats, shared.sums[layer][:, : self.prefix.rows]
        probe_keys = self._rotate((yield from self.prefix.probe_keys(layer)), None)
        began = time.perf_counter()
        voted = probe_sums(shared.probes, q, probe_keys, own, scale=scale)
        verdict = judge(traced[: len(voted)], k, rules)
        stats.identifying += time.perf_counter() - began
        if verdict.selection is not None:
            return verdict.selection, None, probe_keys
        keys = self._rotate((yield from self.prefix.all_keys(layer)), None)
        began = time.perf_counter()
        all_sums(shared.probes, voted, q, keys, own, scale=scale)
        found = fall_back(traced, k, rules, verdict)
        stats.identifying += time.perf_counter() - began
        return found, keys, probe_keys


@dataclass
class Work:
    """Prefixes, and requests over them in order: (prefix, request number, new tokens)."""

    prefixes: list[list[int]]
    warm: list[tuple[int, int, list[int]]]
    judged: list[tuple[int, int, list[int]]]


@dataclass
class Asked:
    """A variant: its caches, what it has counted, and its requests."""

    variant: Variant
    shelf: Shelf
    stats: LoaderStats = field(default_factory=LoaderStats)
    times: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    read_bytes: int = 0
    warm_rows: dict[str, int] = field(default_factory=dict)

    def judge(self) -> None:
        """From now on it counts."""
        self.stats, self.read_bytes = LoaderStats(), 0
        self.warm_rows = {**self.shelf.cache.rows}
        self.times.clear()
        self.waited.clear()


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
        bench = Bench(model, Path(folder), sizes, recorded, options)
        work = bench.fill(rng, requests)
        extra = extra_storage(bench.folder / "text")
        throttle, computing = bench.speed(work, rng)
        rows = bench.measure(work, throttle)
    _report(rows, sizes, throttle, computing, extra, options)
    return 0


def extra_storage(cache: Path) -> float:
    """Bytes of probe keys in all files, over those of all keys and values."""
    probes = others = 0
    for path in cache.glob("*/extents/*/*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, about in header.items():
            if name.startswith("layers."):
                start, stop = about["data_offsets"]
                probes, others = (
                    (probes + stop - start, others) if name.endswith("probe_keys") else (probes, others + stop - start)
                )
    return probes / others


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
    """One model, its cache folders, and what is asked of it."""

    def __init__(self, model: Path, folder: Path, sizes: list[int], recorded: list[Recorded], options: Any) -> None:
        self.model, self.folder, self.sizes, self.recorded, self.options = model, folder, sizes, recorded, options
        self.row_bytes = LAYERS * 2 * HIDDEN * 4
        self.data = sum(sizes) * self.row_bytes
        self.window = max(sizes) + NEW + 32  # the longest context, and all that the device has room for: one of them

    @contextlib.contextmanager
    def engine(
        self, host: int, throttle: Throttle | None = None, folder: str = "text", **cache: Any
    ) -> Iterator[Engine]:
        """One that goes on with a folder."""
        tiers = CacheConfig(
            device_cache=(self.window + 64) * self.row_bytes,
            host_cache=host,
            disk_cache=4 * self.data + 2**30,
            cache_dir=self.folder / folder,
            warm_start=False,
            **{"source": "load", "policy": "lru", **cache},
        )
        config = EngineConfig(
            cache=tiers, threads=self.options.threads, importance=1.0, importance_share=0.0, importance_exact="never",
            importance_renew=0, reorder_interval=0.0, max_batch=1,
            max_model_len=self.window,
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

            each = [(at, requests + at, words(rng, engine, NEW)) for at in range(len(prefixes))]  # once, at least
            warm = [*each, *(draw(n) for n in range(requests))]
            return Work(prefixes, warm, [draw(n) for n in range(requests, 2 * requests)])

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

    def measure(self, work: Work, throttle: Throttle | None) -> list[dict[str, Any]]:
        """All variants: a warm-up, then the requests that count, each asked of all of them."""
        for name in ("reordered", "whole"):  # files that are rewritten get a new one, so that links will do
            shutil.copytree(self.folder / "text", self.folder / name, copy_function=_link)
        few = 64 * self.row_bytes * 24
        with (
            self.engine(few, throttle) as text,
            self.engine(few, throttle, "reordered") as reordered,
            self.engine(max(int(HOST * self.data), few), throttle, "whole") as whole,
        ):
            engines = {"text": text, "reordered": reordered, "whole": whole}
            for engine in (text, reordered):
                important = engine._parts.important
                assert important is not None
                engine._runner._important = Traced(important)  # type: ignore[attr-defined]
            learning = self._new(Variant("to learn the order", "probes", "lfu", reorder=True))
            for request in work.warm:
                self._ask(engines, learning, work, request)
            loader = _loader(reordered)
            reordered._on_thread(lambda: _reorder(loader))
            reordered.settle()
            asked = [self._new(variant) for variant in (*VARIANTS, AGAIN, *PRIORS)]
            for request in work.warm:
                for each in asked:
                    if each.variant.kind != "recompute":
                        self._ask(engines, each, work, request)
            for each in asked:
                each.judge()
            gc.collect()
            gc.freeze()  # a dozen variants' caches in one process: to look through them all takes 0.4 s
            print("warm", flush=True)
            for number, request in enumerate(work.judged):
                for each in asked:
                    if each.variant.kind != "recompute" or number < RECOMPUTED:
                        self._ask(engines, each, work, request)
        return [_row(each) for each in asked]

    def _new(self, variant: Variant) -> Asked:
        device, host = int(DEVICE * self.data), int(HOST * self.data)
        return Asked(variant, Shelf(ScoreCache(device, host, variant.policy), torch.device("cpu")))

    def _ask(self, engines: dict[str, Engine], asking: Asked, work: Work, request: tuple[int, int, list[int]]) -> None:
        at, number, new = request
        variant, prompt = asking.variant, [*work.prefixes[at], *new]
        engine = engines["whole" if variant.kind == "all" else "reordered" if variant.reorder else "text"]
        options: dict[str, Any] = {"kv_retention": RETENTION}
        if variant.kind == "recompute":
            options = {"reuse": False}
        elif variant.kind == "all":
            options = {"kv_retention": 1.0}
        else:
            traced = engine._runner._important  # type: ignore[attr-defined]
            traced.sums = stretched(self.recorded[at], number, LAYERS, HEADS, self.sizes[at], at)
            traced.rules = replace(traced.rules, force="fallback" if variant.kind == "keys" else "no")
            loader = _loader(engine)
            loader.shelf, loader.stats, loader.prior = asking.shelf, asking.stats, variant.prior
        before, waited = _read(engine), asking.stats.waited
        asking.times.append(asked(engine, prompt, **options).ttft)
        asking.read_bytes += _read(engine) - before
        asking.waited.append(asking.stats.waited - waited)


def _reorder(loader: Loader) -> None:
    loader.look()
    while loader.rewriting:
        loader.rewrite()
        time.sleep(0.001)


def _link(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def _loader(engine: Engine) -> Loader:
    important = engine._parts.important
    assert important is not None
    return important.loader


def _read(engine: Engine) -> int:
    """Bytes off the disk so far."""
    store = engine.stats().store
    assert store is not None
    return store.disk_read_bytes + store.chunk_read_bytes


def _row(asked: Asked) -> dict[str, Any]:
    stats, times, count = asked.stats, asked.times, len(asked.times)
    rows = {place: now - asked.warm_rows[place] for place, now in asked.shelf.cache.rows.items()}
    wanted, tally = max(1, sum(rows.values())), stats.tally
    return {
        "variant": asked.variant.name,
        "requests": count,
        "ttft_ms": round(1e3 * statistics.mean(times), 1),
        "median_ms": round(1e3 * statistics.median(times), 1),
        "p99_ms": round(1e3 * max(times), 1),
        "wait_ms": round(1e3 * statistics.mean(asked.waited), 1),
        "read_mb": round(asked.read_bytes / 1e6 / count, 1),
        "device_hits": round(rows["device"] / wanted, 3),
        "host_hits": round(rows["host"] / wanted, 3),
        "fallback_layers": round(stats.fallbacks / max(1, stats.layers), 3),
        "identifying": round(stats.identifying / sum(times), 4),
        "mapping": round(stats.mapping / sum(times), 4),
        "recall": round(tally.recall, 3),
        "precision": round(tally.precision, 3),
        "hidden": round(tally.hit / max(1, tally.used + tally.missing), 3),
        "wasted_mb": round(tally.wasted / 1e6 / count, 1),
    }


def _report(
    rows: list[dict[str, Any]],
    sizes: list[int],
    throttle: Throttle | None,
    computing: float,
    extra: float,
    options: Any,
) -> None:
    rate = "the disk as it is" if throttle is None else f"a disk of {throttle.read_bytes_per_s / 1e6:.0f} MB/s"
    show(
        f"{options.shape} shape, {len(sizes)} prefixes of {min(sizes)} to {max(sizes)} tokens, {NEW} new ones (computed in"
        f" {1e3 * computing:.0f} ms), retention {RETENTION:g}, {rate}",
        ("variant", "TTFT ms", "slowest", "waits ms", "MB read", "on device", "in host", "fall back", "identify", "recall",
         "precision", "hidden", "wasted MB"),
        [
            (r["variant"], f"{r['ttft_ms']:.0f}", f"{r['p99_ms']:.0f}", f"{r['wait_ms']:.0f}", f"{r['read_mb']:.1f}",
             *(f"{100 * r[name]:.0f} %" for name in ("device_hits", "host_hits", "fallback_layers", "identifying")),
             *(f"{100 * r[name]:.0f} %" for name in ("recall", "precision", "hidden")), f"{r['wasted_mb']:.1f}")
            for r in rows
        ],
    )  # fmt: skip
    by_name = {row["variant"]: row for row in rows}
    base, spec, again = by_name[BASE], by_name[SPEC], by_name[AGAIN.name]
    spread, of_waiting = (abs(again[what] / max(0.1, spec[what]) - 1) for what in ("ttft_ms", "wait_ms"))
    print(f"the same variant twice: TTFT differs by {100 * spread:.0f} %, waiting by {100 * of_waiting:.0f} %")
    ladder = [by_name[variant.name] for variant in VARIANTS[3:]]
    shape = Layer(kv_heads=HEADS, probe_heads=3, vector_bytes=4 * HEAD_DIM)
    goals = [
        goal("TTFT, H2O with LFU over SPEC", base["ttft_ms"] / spec["ttft_ms"], 1.2, least=True, spread=spread),
        goal("slowest, H2O with LFU over SPEC", base["p99_ms"] / spec["p99_ms"], 1.0, least=True, spread=spread),
        goal(
            "waiting for I/O, H2O with LFU over SPEC",
            base["wait_ms"] / max(0.1, spec["wait_ms"]),
            1.5,
            least=True,
            spread=of_waiting,
        ),
        goal("identification, share of TTFT", spec["identifying"], 0.06, least=False, spread=spread),
        goal("mapping, share of TTFT", spec["mapping"], 0.02, least=False, spread=spread),
        goal(
            "extra storage, share of keys and values",
            extra,
            round(shape.sidecar_overhead, 6),
            least=False,
            spread=COUNTED,
        ),
        goal(
            "precision of guesses over random ones",
            spec["precision"] / max(0.001, by_name[PRIORS[1].name]["precision"]),
            1,
            least=True,
            spread=COUNTED,
        ),
        *(
            goal(
                f"{after['variant']}: TTFT over the step before",
                after["ttft_ms"] / before["ttft_ms"],
                1.0,
                least=False,
                spread=spread,
            )
            for before, after in itertools.pairwise(ladder)
        ),
    ]
    run = f"{options.shape}, {'the disk as it is' if throttle is None else 'slow disk'}"
    about = {
        "run": run, "quick": options.quick, "sizes": sizes, "retention": RETENTION, "computing_s": round(computing, 4),
        "spread_ttft": round(spread, 4), "spread_waiting": round(of_waiting, 4),
        "disk_bytes_per_s": None if throttle is None else round(throttle.read_bytes_per_s),
    }  # fmt: skip
    runs, all_rows, all_goals = _others(options.json, run)
    all_rows += [{"run": run, **row} for row in rows]
    all_goals += [{**found, "name": f"{run}: {found['name']}"} for found in goals]
    finish(options, all_rows, all_goals, runs=[*runs, about])


def _others(path: Path | None, run: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """What the file has of other runs: about them, their rows, their goals."""
    if path is None or not path.exists():
        return [], [], []
    found = json.loads(path.read_text())
    return (
        [about for about in found.get("runs", ()) if about["run"] != run],
        [row for row in found["rows"] if row.get("run", run) != run],
        [met for met in found["goals"] if ": " in met["name"] and not met["name"].startswith(f"{run}: ")],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
