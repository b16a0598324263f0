#!/usr/bin/env python3
"""SPEC's I/O: figures 16, 17, 18, 20 and 21, and an ablation of its prefetching, which the paper does not have.

Requests over long prefixes that are on disk, with chunk caches that hold 17.5 % of the data on the device and 56 % in host
(SPEC §V-A). The disk is made slow, so that reading a whole prefix takes ten times as long as computing a request over it;
its bytes are real and pass by the page cache. Models are of random weights, with 32 narrow heads a layer: three probe heads are
the part of all keys that they are in OPT-6.7B. With `--shape wide` heads are 64 wide, weights have 8 bits, the disk
reads 500 MB/s, and caches hold 5 and 10 % of the data. What their layers find important comes from the bundled model
(`traces.py`); the work of finding it out is done all the same.

Variants, after the same warm-up in which every prefix is asked about: recompute; load everything (AttentionStore without
hints: LRU in host, and a context on the device); all keys and important values (H2O) with LRU and with LFU; and SPEC step by
step: probe heads (+ITF), rows in order of importance (+RO), caches by score (+SC), the next layer guessed (+SP). Each request is
asked of all variants, one after the other, before the next one is, and of SPEC twice: what these two differ by is the spread
that goals are judged within. Of requests alone, as few as here, the p99 is the slowest.

With --json, what FILE holds of other shapes and disks stays in it.

    python -m benchmarks.papers.spec.io [--quick] [--json FILE] [--shape opt|llama|wide] [--real-disk]
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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from afterglow.bench.report import arguments
from afterglow.bench.timed_requests import asked, words
from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.importance.chunk_cache import ChunkCache, ChunkPlacement
from afterglow.importance.chunk_loader import ChunkLoader
from afterglow.model.presets import save_hf
from afterglow.model.spec import ModelSpec, RopeSpec
from afterglow.store.extents.throttle import Throttle
from benchmarks.papers.spec.io_report import _report, _row
from benchmarks.papers.spec.io_variants import (
    AGAIN,
    NEW,
    RATIO,
    RECOMPUTED,
    RETENTION,
    SHAPES,
    VARIANTS,
    Asked,
    Shape,
    Traced,
    Variant,
    Way,
    Work,
    guessing,
)
from benchmarks.papers.spec.traces import Recorded, record, stretched
from benchmarks.peers.random_gguf import write_random

FILL = 4 << 30  # bytes of host memory, at most, while prefixes are written to disk


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.papers.spec.io", __doc__ or "")
    parser.add_argument("--shape", choices=SHAPES, default="llama", help="the model's shape (default llama)")
    parser.add_argument("--real-disk", action="store_true", help="the disk as it is")
    options = parser.parse_args(args)
    shape = SHAPES[options.shape]
    count, lengths, requests = (4, (2048, 4096), 8) if options.quick else (shape.count, shape.lengths, 24)
    rng = random.Random(options.seed)
    recorded = record(count, 1500, options.seed)
    with tempfile.TemporaryDirectory(prefix="afterglow-bench-") as folder:
        sizes = [rng.randrange(lengths[0], lengths[1] + 1) // 64 * 64 for _ in range(count)]
        model = make_model(Path(folder), shape, max(sizes) + NEW + 64, options.seed)
        bench = Bench(str(model), Path(folder), sizes, recorded, shape, options)
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


def make_model(folder: Path, shape: Shape, window: int, seed: int) -> Path:
    """Write a model of random weights that has positions for `window` tokens."""
    model = folder / "model"
    if shape.weights == "opt":
        from transformers import OPTConfig, OPTForCausalLM

        torch.manual_seed(seed)
        config = OPTConfig(
            vocab_size=2048, hidden_size=shape.hidden, num_hidden_layers=shape.layers, ffn_dim=4 * shape.hidden,
            num_attention_heads=shape.heads, max_position_embeddings=window, word_embed_proj_dim=shape.hidden,
        )  # fmt: skip
        OPTForCausalLM(config).save_pretrained(model)
        return model
    spec = ModelSpec(
        family="llama", layers=shape.layers, hidden=shape.hidden, heads=shape.heads, kv_heads=shape.groups, head_dim=shape.head_dim,
        ffn=shape.ffn, vocab=2048, max_positions=window, rope=RopeSpec(dim=shape.head_dim, base=10000.0), eos_ids=(2,),
    )  # fmt: skip
    if shape.weights == "float":
        save_hf(spec, model, seed=seed)
        return model
    model = model.with_suffix(".gguf")
    write_random(model, spec, shape.weights, seed=seed)
    return model


class Bench:
    """One model, its cache folders, and its requests."""

    device = torch.device("cpu")
    cold = False  # do whole prefixes come from disk each time
    reply = 1  # tokens

    def __init__(
        self,
        model: str,
        folder: Path,
        sizes: list[int],
        recorded: list[Recorded] | None,
        shape: Shape,
        options: Any,
        **config: Any,
    ) -> None:
        """`recorded`: what layers find important; None: what they do. `config`: more of the engines' settings."""
        self.model, self.folder, self.sizes, self.recorded, self.options = model, folder, sizes, recorded, options
        self.shape = shape
        self.config = config
        self.row_bytes = shape.row_bytes
        self.data = sum(sizes) * self.row_bytes
        self.window = max(sizes) + NEW + 32  # the longest context, and all that the device has room for: one context

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
            reorder_interval=0.0, max_batch=1, max_model_len=self.window, **{"importance_renew": 0, **self.config},
        )  # fmt: skip
        engine = Engine.load(self.model, config, throttle=throttle)
        engine.start()
        try:
            yield engine
        finally:
            engine.close()

    def fill(self, rng: random.Random, requests: int, text: Iterator[int] | None = None) -> Work:
        """Compute the prefixes, and leave them on disk. `text`: where tokens come from; None: they are random."""
        with self.engine(min(2 * self.data, FILL)) as engine:

            def some(number: int) -> list[int]:
                return words(rng, engine, number) if text is None else list(itertools.islice(text, number))

            prefixes = [some(size) for size in self.sizes]
            for prefix in prefixes:
                asked(engine, prefix)
                engine.settle()
            middle, spread = (len(prefixes) - 1) / 2, len(prefixes) / 4

            def draw(number: int) -> tuple[int, int, list[int]]:
                at = min(
                    len(prefixes) - 1, max(0, round(rng.gauss(middle, spread)))
                )  # reuse is normal, as in the paper
                return at, number, some(NEW)

            # Even numbers warm up, and odd ones count: so no importance is known before (see `traces`).
            each = [(at, 2 * (requests + at), some(NEW)) for at in range(len(prefixes))]  # once, at least
            warm = [*each, *(draw(2 * n) for n in range(requests))]
            return Work(prefixes, warm, [draw(2 * n + 1) for n in range(requests)])

    def speed(self, work: Work, rng: random.Random) -> tuple[Throttle | None, float]:
        """How slow the disk is to be, and what computing a request over a prefix takes, in seconds."""
        at = self.sizes.index(sorted(self.sizes)[len(self.sizes) // 2])
        with self.engine(min(2 * self.data, FILL)) as engine:
            asked(engine, work.prefixes[at])
            engine.demote("host")
            times = []
            for _ in range(5):
                times.append(asked(engine, [*work.prefixes[at], *words(rng, engine, NEW)]).ttft)
                engine.demote("host")
            computing = statistics.median(times)
        whole = self.sizes[at] * self.row_bytes
        rate = self.shape.rate or whole / (RATIO * computing)
        return (None if self.options.real_disk else Throttle(read_bytes_per_s=rate, latency_s=1e-4)), computing

    def measure(self, work: Work, throttle: Throttle | None) -> list[dict[str, Any]]:
        """All variants of the paper's ladder."""
        self.prepare(work)
        with self.engines(throttle) as engines:
            return self.compare(engines, work, [*VARIANTS, AGAIN, *map(guessing, self.shape.priors)])

    def prepare(self, work: Work) -> None:
        """Make the folders of the other engines; in some, rows are put in the order of importance to the warm-up's requests."""
        shutil.copytree(self.folder / "text", self.folder / "whole", copy_function=_link)
        shutil.copytree(self.folder / "text", self.folder / "reordered", copy_function=_link)
        with self.engine(self.few, None, "reordered") as reordered:
            self._trace(reordered)
            learning = self._new(Variant("to learn the order", "probes", "lfu", reorder=True))
            for request in work.warm:
                self._ask({"reordered": reordered}, learning, work, request)
            loader = _loader(reordered)
            reordered.ask(lambda: _reorder(loader))
            reordered.settle()
        shutil.copytree(self.folder / "reordered", self.folder / "auto", copy_function=_link)

    @property
    def few(self) -> int:
        """Give the bytes of host memory of engines that do not load whole prefixes."""
        return 64 * self.row_bytes * 24

    @contextlib.contextmanager
    def engines(self, throttle: Throttle | None, auto: bool = False) -> Iterator[dict[str, Engine]]:
        """All engines. `auto`: with one that chooses its way."""
        largest = (self.window + 256) * self.row_bytes  # a prefix that host cannot hold would be computed anew
        most = max(int(self.shape.host * self.data), largest)
        with contextlib.ExitStack() as stack:
            found = {
                name: stack.enter_context(self.engine(host, throttle, name))
                for name, host in {"text": self.few, "reordered": self.few, "whole": most}.items()
            }
            if auto:
                found["auto"] = stack.enter_context(self.engine(most, throttle, "auto", source="auto"))
            for name, engine in found.items():
                if name != "whole":
                    self._trace(engine)
            yield found

    def compare(
        self, engines: dict[str, Engine], work: Work, variants: Sequence[Variant], recomputed: int = RECOMPUTED
    ) -> list[dict[str, Any]]:
        """Warm up, then ask each request that counts of every variant. `recomputed`: of so many the whole prompt is computed."""
        asked = [self._new(variant) for variant in variants]
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
                if each.variant.kind != "recompute" or number < recomputed:
                    self._ask(engines, each, work, request)
        gc.unfreeze()
        return [_row(each) for each in asked if each.times]

    def _trace(self, engine: Engine) -> None:
        important = engine.parts.selective
        assert important is not None
        if self.recorded is not None:
            engine.parts.runner._selective = Traced(important)

    def _new(self, variant: Variant) -> Asked:
        device, host = int(self.shape.device * self.data), int(self.shape.host * self.data)
        return Asked(variant, ChunkCache(ChunkPlacement(device, host, variant.policy), self.device))

    def _ask(self, engines: dict[str, Engine], asking: Asked, work: Work, request: tuple[int, int, list[int]]) -> None:
        at, number, new = request
        variant, prompt = asking.variant, [*work.prefixes[at], *new]
        name = {"all": "whole", "auto": "auto"}.get(variant.kind, "reordered" if variant.reorder else "text")
        engine = engines[name]
        options: dict[str, Any] = {"kv_retention": RETENTION}
        if variant.kind == "recompute":
            options = {"reuse": False}
        elif variant.kind == "all":
            options = {"kv_retention": 1.0}
        else:
            selecting = engine.parts.runner._selective
            assert selecting is not None
            if self.recorded is not None:
                assert isinstance(selecting, Traced)
                sums = stretched(self.recorded[at], number, self.shape.layers, self.shape.groups, self.sizes[at], at)
                selecting.sums = [layer.to(self.device) for layer in sums]
            selecting.renew = variant.renew
            selecting.rules = replace(selecting.rules, force="fallback" if variant.kind == "keys" else "no")
            loader = _loader(engine)
            loader.cache, loader.stats, loader.prior = asking.shelf, asking.stats, variant.prior
        if self.cold and variant.kind in ("all", "auto"):
            engine.demote("disk")
        before, waited, selections = _read(engine), asking.stats.waited, asking.stats.requests
        turn = asked(engine, prompt, self.reply, **options)
        asking.times.append(turn.ttft)
        if self.reply > 1:
            asking.tokens.append((turn.last - turn.first) / (self.reply - 1))
        asking.ways.append(way_of(asking.stats.requests > selections, turn.cached.total, self.sizes[at]))
        asking.read_bytes += _read(engine) - before
        asking.waited.append(asking.stats.waited - waited)


def way_of(selected: bool, cached: int, rows: int) -> Way:
    """Say what an engine did with a prefix of `rows` rows, `cached` of them reused."""
    return "select" if selected else "load" if cached >= rows else "split" if cached else "recompute"


def _reorder(loader: ChunkLoader) -> None:
    loader.look()
    while loader.rewriting:
        loader.rewrite()
        time.sleep(0.001)


def _link(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def _loader(engine: Engine) -> ChunkLoader:
    important = engine.parts.selective
    assert important is not None
    return important.loader


def _read(engine: Engine) -> int:
    """Bytes off the disk so far."""
    store = engine.stats().store
    assert store is not None
    return store.disk_read_bytes + store.chunk_read_bytes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
