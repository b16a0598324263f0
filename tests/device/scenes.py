"""What an engine answers on a device: each scene returns what `play.py` prints as JSON."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine import hardware, prefill_pass, setup, token_outputs
from afterglow.engine.engine import Engine
from afterglow.engine.gather import BatchEntry, Gatherer
from afterglow.engine.transfers import StepInputs
from afterglow.errors import ConfigError
from afterglow.kernels import passes
from afterglow.kernels.built import native
from afterglow.kernels.context_pages import Pages
from afterglow.kernels.device_products import RoundedFilling, RoundedMatrix, rounded_rows
from afterglow.kernels.rope import LayerRopes, Rotation
from afterglow.kernels.slot_gather import SlotGather
from afterglow.memo.pooling import Pooling
from afterglow.memo.sequence_embedder import Embedder
from afterglow.model.decoder import PlainAttend
from afterglow.model.names import Names
from afterglow.model.presets import PRESETS, RandomSource, save_hf
from afterglow.model.weights import WeightAssembler
from afterglow.plan.tiers.cost import Cost
from afterglow.request import Grammar, Output, Request, SamplingParams
from afterglow.text import Tokenizer
from tests.device import pretend
from tests.device.counts import TRITON_BATCHES, measure
from tests.device.doors import slots_read
from tests.engine.conftest import FAMILIES, write_model
from tests.structured_model import random_model

MiB = 2**20


def load(device: str, folder: Path, model: str | Path = "tiny", write_buffer: int = 8 * MiB, **options: Any) -> Engine:
    cache = CacheConfig(
        write_buffer=write_buffer,
        device_cache=16 * MiB,
        host_cache=8 * MiB,
        disk_cache=64 * MiB,
        cache_dir=folder,
        source="load",
        warm_start=False,
    )
    engine = Engine.load(model, EngineConfig(device=device, dtype="float32", cache=cache, **options))
    engine.start()
    return engine


def ask(engine: Engine, prompts: list[list[int]], tokens: int = 6, logprobs: int | None = 2, **more: Any) -> list[Any]:
    sampling = SamplingParams(max_tokens=tokens, temperature=0, logprobs=logprobs, ignore_eos=True)
    numbers = [f"r{random.random()}" for _ in prompts]
    done = engine.generate([Request(n, p, sampling, **more) for n, p in zip(numbers, prompts, strict=True)])
    return [[list(each.tokens), each.cached.total, [lp.logprob for lp in each.logprobs or ()]] for each in done]


def draw(seed: int, rows: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 200) for _ in range(rows)]


def reuse(device: str, folder: Path) -> list[Any]:
    """Prefill, then reuse from device, host and disk, then a batch that shares a prefix."""
    engine = load(device, folder, relay="on")
    prefix = draw(1, 200)
    found = ask(engine, [prefix])
    for tier in ("device", "host", "disk"):
        engine.settle()
        if tier != "device":
            engine.demote(tier)
        found += ask(engine, [[*prefix, *draw(len(found), 10)]])
    found += ask(engine, [[*prefix, *draw(100 + i, 5 + i)] for i in range(4)])
    other = draw(2, 130)
    found += ask(engine, [other])
    # Those that read rows together are not neighbours in the batch.
    found += ask(engine, [[*(prefix, other)[i % 2], *draw(110 + i, 5 + i)] for i in range(4)])
    engine.close()
    return found


def kernels(device: str, folder: Path) -> list[Any]:
    """A prompt, then a batch that shares its rows; and whether Triton's kernels were launched often."""
    from tests.device.watching import watch

    engine = load(device, folder, relay="on")
    prefix = draw(3, 140)
    found = ask(engine, [prefix])
    found += ask(engine, [[*prefix, *draw(200 + i, 3 + i)] for i in range(3)])
    engine.close()
    return [*found, watch.counts["launches of Triton"] > 40]  # how often exactly depends on when requests come


def stored(device: str, folder: Path) -> list[Any]:
    """Rows in 8 bits that come from host memory and disk; and how often Triton's kernel read them."""
    from tests.device.watching import watch

    engine = load(device, folder, kv_dtype="int8", relay="off")
    prefix = draw(6, 80)
    found = ask(engine, [prefix], tokens=2)
    for tier in ("host", "disk"):
        engine.settle()
        engine.demote(tier)
        found += ask(engine, [[*prefix[: 79 - len(found)], *draw(300 + len(found), 5)]], tokens=2)
    engine.close()
    return [*found, watch.counts["launches of _gather"]]


def mixture(device: str, folder: Path) -> list[Any]:
    """Experts that rows of a prompt and a reply choose; and how often Triton's kernel had found them."""
    from tests.device.watching import watch

    model = write_model({**FAMILIES["mixtral"], "vocab_size": 256}, folder / "model")
    engine = load(device, folder, model, relay="off", speculate="off")
    found = ask(engine, [draw(3, 20)], tokens=3)
    engine.close()
    return [*found, watch.counts["launches of _expert_wide"]]


def compiled(device: str, folder: Path) -> bool:
    """What is compiled for the CPU, given memory of the device: whether it has computed."""
    x, weight = torch.ones(2, 64), torch.ones(64)
    with (
        pretend.active() if device == "cuda" else contextlib.nullcontext(),
        mock.patch.object(passes, "suited", return_value=native()),
    ):
        normed = passes.rms_norm(x.to(device), weight.to(device), 1e-6)
    return bool(torch.isfinite(normed).all())


def embedding(device: str, folder: Path) -> list[Any]:
    """Vectors of texts, in a thread that has chosen no device; and how often Triton's kernels were launched."""
    from tests.device.watching import watch

    on = torch.device(device)
    with pretend.active() if device == "cuda" else contextlib.nullcontext():
        model = WeightAssembler(PRESETS["tiny"], Names(), RandomSource(3), torch.float32, on, "none").decoder()
        embedder = Embedder(model, Pooling("last"))
        found = embedder.embed([draw(i, 9 + 5 * i) for i in range(2)])
    return [found.vectors.tolist(), watch.counts["launches of Triton"]]


def importance(device: str, folder: Path) -> list[Any]:
    """A part of a prefix that lies on disk, whose reads are measured and guessed ahead; the same with heads that are no probes, whose keys
    are read where probes disagree."""
    model = folder.parent / f"{folder.name}-model"
    save_hf(replace(PRESETS["tiny"], kv_heads=4), model)
    found, prefix = [], draw(2, 260)
    for name, which in (("probes", "tiny"), ("others", model)):
        engine = load(device, folder / name, which, importance=0.5, importance_exact="never")
        found += ask(engine, [prefix])
        for i in range(3):
            engine.settle()
            engine.demote("disk")
            found += ask(engine, [[*prefix, *draw(10 + i, 20)]])
        engine.close()
    return found


def choice(device: str, folder: Path) -> list[Any]:
    """What `auto` takes, and what it takes when the device gives other answers."""
    sample = token_outputs.sample

    def other(logits: Any, samplers: Any, meanwhile: Any = None) -> list[int]:
        tokens = sample(logits, samplers, meanwhile)
        return [token ^ 1 for token in tokens] if logits.is_cuda else tokens

    found = []
    for how in (sample, other):
        with mock.patch.object(token_outputs, "sample", how):
            engine = load("auto", folder / how.__name__)
        found.append(engine.decoder.device.type)
        engine.close()
    return found


def memory(device: str, folder: Path) -> list[Any]:
    """How much memory is locked, whether it is let go, what a limit says, and what is computed after that."""
    from tests.device.watching import watch

    runtime = watch.runtime
    arena = hardware.allocate(3 * MiB + 4096, pin=True)
    found: list[Any] = [list(runtime.locked.values())]
    del arena
    found.append(list(runtime.locked.values()))
    runtime.limit = MiB
    with pretend.active():
        try:
            hardware.allocate(2 * MiB, pin=True)
        except ConfigError as error:
            found.append(str(error))
        found.append((torch.ones(2, device="cuda") + 1).tolist())
    return found


def fitting(device: str, folder: Path) -> list[Any]:
    """What an engine takes of a device with 1 GiB free, by itself and when it is told; what it says where that is too much, or too little."""
    from tests.device.watching import watch

    found: list[Any] = []
    folder.mkdir()
    journal = folder / "journal.jsonl"
    told: list[dict[str, Any]] = [{}, {"max_batch": 3, "prefill_chunk": 4096}, {"device_cache": 2**29}]
    for more in [*told, {"device_cache": 2**31}, {"importance": 0.5}, {"free": 9 * MiB}]:
        more = dict(more)
        watch.runtime.free = more.pop("free", 2**30)
        sizes = {"device_cache": more.pop("device_cache")} if "device_cache" in more else {}
        cache = CacheConfig(host_cache=8 * MiB, disk_cache=0, **sizes)
        try:
            engine = Engine.load(
                "tiny", EngineConfig(device=device, dtype="float32", cache=cache, journal=journal, **more)
            )
        except ConfigError as error:
            found.append(str(error))
            continue
        size = engine.parts.sizes
        engine.close()
        plan = json.loads(journal.read_text().splitlines()[0])["settings"]
        rows = size.context_bytes + size.read_buffer_bytes
        found.append([rows, size.chunk_bytes, plan["max_batch"], plan["prefill_chunk"]])
    return found


def counts(device: str, folder: Path) -> Any:
    """What steps ask of the device."""
    return measure(device, folder)


def fewest_counts(device: str, folder: Path) -> Any:
    """The same of two requests alone, and few rows, which have graphs where Triton's kernels run."""
    return measure(device, folder, (2,), new=8)


def few_counts(device: str, folder: Path) -> Any:
    """The same of two small batches."""
    return measure(device, folder, (2, 8))


def triton_counts(device: str, folder: Path) -> Any:
    """The same of few rows for small batches. All steps have graphs."""
    with mock.patch.object(prefill_pass, "ROWS", (16, 64)):
        return measure(device, folder, TRITON_BATCHES, new=8)


def mixed(device: str, folder: Path) -> list[str]:
    """Operators that refuse tensors of two devices."""
    with pretend.active():
        here, there = torch.ones(2, 2), torch.ones(2, 2, device="cuda")
        some = torch.tensor([0], device="cuda")
        calls = {
            "add": lambda: there + here,
            "mm": lambda: here @ there,
            "index": lambda: here[some],
            "index_put_": lambda: there.index_put_((some,), here[0]),
            "cat": lambda: torch.cat([here, there]),
            "where": lambda: torch.where(there > 0, here, there),
            "addmm_": lambda: there.addmm_(there, here),
            "a number": lambda: there + torch.tensor(1.0),  # which CUDA takes
        }
        found = []
        for name, call in calls.items():
            try:
                call()
            except pretend.Mismatch:
                found.append(name)
    return found


def waits(device: str, folder: Path) -> Any:
    """What steps wait for: with prompts in several steps behind a shared prefix, and draws with seeds and without; with log-probabilities."""
    from tests.device.watching import watch

    engine = load(device, folder, relay="on", prefill_chunk=48, speculate="off")
    prefix = draw(1, 70)
    found: dict[str, Any] = {"waits": set(), "most": []}
    for i in range(2):  # kernels are tried at their first use
        ask(engine, [[*prefix, *draw(i, 9)]], tokens=2)
        engine.settle()
        engine.demote("host")
    for logprobs in (None, 2):
        watch.steps.clear()
        for seed in (None, 3):
            drawn = SamplingParams(
                max_tokens=18, temperature=0.8, top_p=0.9, seed=seed, logprobs=logprobs, ignore_eos=True
            )
            prompts = [[*prefix, *draw(10 + i, 5 + 60 * i)] for i in range(3)]
            engine.generate([Request(f"r{random.random()}", prompt, drawn) for prompt in prompts])
            engine.settle()
            engine.demote("host")
        for step in watch.steps:
            found["waits"] |= {line for what, line in step.lines if what == "synchronisations"}
        found["most"].append(max(step.counts["synchronisations"] for step in watch.steps))
    engine.close()
    return {**found, "waits": sorted(found["waits"])}


def races(device: str, folder: Path) -> Any:
    """Which streams use memory that others write, while rows leave, come back from host memory and disk, and are shared."""
    from tests.device.watching import watch

    watch.racing = device == "cuda"
    engine = load(device, folder, relay="on", prefill_chunk=48)
    if watch.racing:
        watch.look_for_races()
    prefix = draw(1, 70)
    found = ask(engine, [prefix], tokens=18)
    for tier in ("host", "disk"):
        engine.settle()
        assert engine.stats().plan.saves_in_flight == 0, "rows that leave are not handed over"
        engine.demote(tier)
        found += ask(engine, [[*prefix, *draw(len(found) + i, 9 + 50 * i)] for i in range(2)], tokens=3)
        found += ask(engine, [[*prefix, *draw(200 + len(found), 60)]], tokens=2)  # its first step draws nothing
    found += ask(engine, [draw(9, 100)], tokens=1, reuse=False)  # steps that save nothing either
    engine.close()
    return {"races": watch.races, "answers": found}


def full_buffer(device: str, folder: Path) -> Any:
    """Rows that leave when more are leaving than may be: the next layers wait. Those of a prompt go straight to their slots: none is
    `staged` in other locked memory."""
    from tests.device.watching import watch

    watch.racing = device == "cuda"
    engine = load(device, folder, write_buffer=1)
    if watch.racing:
        watch.look_for_races()
    prompt = draw(1, 130)
    found = ask(engine, [prompt], tokens=1)
    engine.settle()
    engine.demote("host")
    found += ask(engine, [[*prompt, *draw(2, 70)]], tokens=1)
    staged = watch.lines["pinned allocations", "engine/row_exit.py:stage"]
    engine.close()
    return {"races": watch.races, "answers": found, "staged": staged}


def sending(device: str, folder: Path) -> Any:
    """A step's numbers that are sent before those of the step before have been read."""
    from tests.device.watching import watch

    if device == "cuda":
        watch.look_for_races()
    with pretend.active() if device == "cuda" else contextlib.nullcontext():
        inputs = StepInputs(torch.device(device))
        sent = [inputs.send(torch.arange(4) + step, torch.tensor([step])) for step in range(3)]
        answers = [torch.cat(list(each)).cpu().tolist() for each in sent]
    return {"races": watch.races, "answers": answers}


def no_memory(device: str, folder: Path) -> Any:
    """A request whose rows are on their way when the device has no memory left: it waits, another goes on, and two that come before it
    in the queue get its pages."""
    from tests.device.watching import watch

    watch.racing = device == "cuda"
    engine = load(device, folder, relay="off", max_batch=2)
    prefix = draw(1, 70)
    ask(engine, [prefix], tokens=1)
    engine.settle()
    engine.demote("host")
    if watch.racing:
        watch.look_for_races()
    begin, failed = Gatherer.begin, []
    others, ended = [], threading.Semaphore(0)

    def told(output: Output) -> None:
        others.append((output.request_id, output.tokens))
        if output.finish_reason is not None:
            ended.release()

    def begun(self: Gatherer, entries: Sequence[BatchEntry], rope: LayerRopes | None) -> None:
        begin(self, entries, rope)
        if self.gathering and len(entries) > 1 and not failed:
            failed.append(len(entries))
            sampling = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
            for name in ("third", "fourth"):
                engine.submit(Request(name, draw(len(name), 9), sampling, priority=-1), told)
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")

    with mock.patch.object(Gatherer, "begin", begun):
        found = ask(engine, [draw(2, 9), [*prefix, *draw(3, 9)]], tokens=12)
    assert all(ended.acquire(timeout=60) for _ in range(2))
    engine.close()
    assert failed, "nothing ran out of memory"
    return {"races": watch.races, "answers": [*found, sorted(others)]}


def read_ahead(device: str, folder: Path) -> Any:
    """Requests with rows in host memory that wait: their turn comes; one is cancelled, and another one comes in its place.

    Copies are taken to read the slots themselves, as Triton's kernel does. With the tokens come the bytes that were read ahead, and those
    that steps read from slots themselves.
    """
    from tests.device.watching import watch

    watch.racing = device == "cuda"
    put = SlotGather.put

    def noted(
        self: SlotGather, stored: Tensor, pages: Pages, layer: int, rotation: Rotation | None, least: int
    ) -> None:
        put(self, stored, pages, layer, rotation, least)
        if watch.racing:
            watch.launch("gather", [stored[:, slot, first:stop] for slot, first, stop in slots_read(self)], [])

    prefixes = [draw(1 + i, 70 + 60 * i) for i in range(2)]
    engine = load(device, folder, relay="off", speculate="off", max_batch=1)
    ask(engine, prefixes, tokens=1)
    engine.settle()
    if watch.racing:
        watch.look_for_races()
    found: list[Any] = []
    with mock.patch.object(SlotGather, "put", noted):
        for layers in (None, 1):
            engine.baseline(read_buffer=layers, source="load")
            for cancelled in (False, True):
                engine.settle()
                engine.demote("host")
                found += waiting(engine, prefixes, cancelled)
            counted = engine.stats().engine.gather
            found += [counted.ahead_read, counted.bytes_read - counted.ahead_used]
    engine.close()
    return {"races": watch.races, "answers": found}


def rated(device: str, folder: Path) -> Any:
    """The same with a bus that brings a row of a layer in a millisecond, and in ten: how many bytes the formula has them read ahead."""
    prefixes = [draw(1 + i, 70 + 60 * i) for i in range(2)]
    found: list[Any] = []
    for row_seconds in (0.001, 0.01):
        with (
            mock.patch.object(setup, "copy_rate", lambda host, device, seconds=row_seconds: 2 * 2 * 16 * 4 / seconds),
            mock.patch.object(Cost, "compute", lambda self, rows, start, gathered=0: 0.04 * rows),
        ):
            engine = load(device, folder / str(row_seconds), relay="off", speculate="off", max_batch=1)
            engine.baseline(read_buffer="auto", source="load")
            ask(engine, prefixes, tokens=1)
            engine.settle()
            engine.demote("host")
            found += waiting(engine, prefixes, cancelled=False)
            counted = engine.stats().engine.gather
            found += [counted.ahead_read, counted.bytes_read - counted.ahead_used]
            engine.close()
    return found


def waiting(engine: Engine, prefixes: list[list[int]], cancelled: bool) -> list[list[int]]:
    """Ask for a reply, and for others behind it that begin with prefixes; perhaps the first of them is cancelled meanwhile."""
    sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    waits = [Request(f"p{i}", [*prefix, *draw(20 + i, 9)], sampling) for i, prefix in enumerate(prefixes)]
    tokens: dict[str, list[int]] = {}
    ended = threading.Semaphore(0)

    def told(output: Output) -> None:
        tokens.setdefault(output.request_id, []).extend(output.tokens)
        if output.finish_reason is not None:
            ended.release()
        if output.request_id == "first":
            drawn = len(tokens["first"])
            for request in waits if drawn == 1 else ():
                engine.submit(request, told)
            if cancelled and drawn == 2:
                engine.cancel("p0")

    engine.submit(Request("first", draw(9, 40), sampling, reuse=False), told)
    assert all(ended.acquire(timeout=60) for _ in range(3))
    return [found for name, found in sorted(tokens.items()) if not (cancelled and name == "p0")]


def scores(device: str, folder: Path) -> list[Any]:
    """Attention that is recorded, and decides what a conversation that grows too long keeps."""
    engine = load(device, folder, max_model_len=256, truncation_policy="importance")
    prompt = draw(3, 180)
    found = []
    for turn in range(3):
        found += ask(engine, [prompt], truncation=True)
        if not turn:  # rows that have been counted, and no others
            found += ask(engine, [prompt[:176]], tokens=1, truncation=True)
        prompt = [*prompt, *found[0][0], *draw(30 + turn, 40)]
    engine.close()
    return found


def renewing(device: str, folder: Path) -> list[Any]:
    """Selections that replies renew, of rows in host memory and on disk, by head and as a whole."""
    found = []
    for fallback in ("per_head", "all"):
        options: dict[str, Any] = {"importance_fallback": fallback, "importance_exact": "never"}
        engine = load(device, folder / fallback, importance=0.3, importance_renew=2, **options)
        prefix = draw(4, 200)
        ask(engine, [prefix], tokens=1)
        for tier in ("host", "disk"):
            engine.settle()
            engine.demote(tier)
            found += ask(engine, [[*prefix, *draw(50 + len(found), 6)]])
        engine.close()
    return found


def agreeing(device: str, folder: Path) -> list[Any]:
    """Selections of probe heads that are believed at once: keys of the head that is no probe are first read while decoding."""
    model = folder.parent / f"{folder.name}-model"
    save_hf(replace(PRESETS["tiny"], kv_heads=4), model)
    options: dict[str, Any] = {"importance_alpha": 20.0, "importance_exact": "never"}
    engine = load(device, folder, model, importance=0.3, importance_renew=2, **options)
    prefix = draw(4, 200)
    ask(engine, [prefix], tokens=1)
    found = []
    for tier in ("host", "disk"):
        engine.settle()
        engine.demote(tier)
        found += ask(engine, [[*prefix, *draw(50 + len(found), 6)]])
    assert engine.parts.selective is not None
    cache = engine.parts.selective.loader.cache
    chunks = {key: cache.look(key) for key in cache.placement.members("device")}
    found.append([rows is not None and rows.device.type == device for rows in chunks.values()])
    engine.close()
    return found


def means(device: str, folder: Path) -> list[Any]:
    """Selections of rows in host memory and on disk, beside means of chunks that stand for the others."""
    engine = load(device, folder, importance=0.3, importance_rest="means", importance_exact="never")
    prefix = draw(4, 200)
    ask(engine, [prefix], tokens=1)
    found = []
    for tier in ("host", "disk"):
        engine.settle()
        engine.demote(tier)
        found += ask(engine, [[*prefix, *draw(50 + len(found), 6)]])
    engine.close()
    return found


def filled(device: str, folder: Path) -> list[Any]:
    """A matrix that is rounded, of weights that are on the device already."""
    weights = torch.randn(70, 64, generator=torch.Generator().manual_seed(5))
    found = []
    with pretend.active() if device == "cuda" else contextlib.nullcontext():
        for bits, grouped, floats in ((8, False, False), (8, True, False), (4, True, False), (8, False, True)):
            filling = RoundedFilling(70, 64, torch.device(device), bits, grouped=grouped, floats=floats)
            filling.fill(0, weights.to(device))
            found.append(filling.done(None).widened(0, 70, torch.float32).flatten().cpu().tolist())
    return found


def grammar(device: str, folder: Path) -> list[Any]:
    """A reply that a grammar shapes, beside a free one."""
    model = random_model(folder.parent / f"{folder.name}-model")
    engine = load(device, folder, model)
    engine.grammars.use_tokenizer(Tokenizer(model).serialized)
    shaped = SamplingParams(max_tokens=6, temperature=0, grammar=Grammar("regex", "[a-f]{3,8}"))
    free = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    done = engine.generate([Request(f"g{i}", draw(70 + i, 20), each) for i, each in enumerate((shaped, free))])
    engine.close()
    return [list(each.tokens) for each in done]


def drawing(device: str, folder: Path) -> list[Any]:
    """Replies with and without a grammar, biases and penalties side by side. Greedy ones alone are the CPU's."""
    engine = load(device, folder)
    shaped = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logit_bias={7: 3.0}, repetition_penalty=1.2)
    drawn = SamplingParams(max_tokens=4, temperature=1.0, seed=1, top_p=0.9, ignore_eos=True)
    plain = SamplingParams(max_tokens=4, temperature=0, logprobs=3, prompt_logprobs=1, ignore_eos=True)
    done = engine.generate([Request(f"d{i}", draw(60 + i, 30), each) for i, each in enumerate((shaped, drawn, plain))])
    engine.close()
    return [list(each.tokens) for each in done]


class Widened(RandomSource):
    """Random weights, of which matrices have been rounded, to the last detail as they are for CUDA, and widened again."""

    def __init__(self, kind: str) -> None:
        super().__init__(3)
        self._kind = kind

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        exact = super().get(name, shape)
        table = "embed" in name
        if len(shape) < 2 or "norm" in name or name.endswith(".bias") or (table and self._kind != "int4"):
            return exact
        head, grouped = table or "lm_head" in name, self._kind == "int4" and shape[1] % 32 == 0
        numbers, scale = rounded_rows(exact, 4 if grouped and not head else 8, grouped, self._kind == "float8")
        return RoundedMatrix(numbers, scale, shape[1]).widened(0, shape[0], torch.float32)


def rounded(device: str, folder: Path) -> list[Any]:
    """Logits of models whose weights alone are rounded: one row, and more than the kernel takes. A width that is no whole blocks."""
    tiny = PRESETS["tiny"]
    found = []
    for kind in ("int8", "int4", "float8"):
        for spec in (tiny, replace(tiny, tied_embeddings=kind == "int4", qkv_bias=True, ffn=72)):
            source = RandomSource(3) if device == "cuda" else Widened(kind)
            how: Any = kind if device == "cuda" else "none"
            with pretend.active() if device == "cuda" else contextlib.nullcontext():
                on = torch.device(device)
                model = WeightAssembler(spec, Names(), source, torch.float32, on, how).decoder()
                for rows in (1, 130):
                    ids, positions = ((torch.arange(rows) * by % 512).to(on) for by in (7, 1))
                    logits = model.logits(model.forward(ids, positions, PlainAttend(model, positions, [rows])))
                    found.append(logits[-1].cpu().tolist())
            found.append(model.quantization)
    return found
