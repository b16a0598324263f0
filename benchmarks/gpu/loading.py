"""CachedAttention's figures 18 to 20 with LLaMA-13B's shape: reuse, layer-wise pre-loading with a read buffer, saving beside computing.

The history is in host memory, as in the paper; its rows take 800 KiB each.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

from afterglow.bench.report import goal, spread
from afterglow.bench.timed_requests import ask, asked, words
from afterglow.choices import Preload, ReadBuffer
from afterglow.engine.engine import Engine
from benchmarks.gpu.models import engine_on_device, shape_of
from benchmarks.gpu.setting import Ceilings, Found, Setting, table

MODEL = "LLaMA-13B"
PAPER_19 = {"PL-B0": 0.35, "PL-B15": 0.61}  # less time to the first token than without pre-loading
BUFFERS = (0, 5, 10, 15, 40)  # layers


def reuse(setting: Setting, ceilings: Ceilings) -> Found:
    """Time 1,000 tokens of which 500 to 900 are history (figure 18): computed, loaded before, loaded layer by layer."""
    shape, rng = shape_of(MODEL, setting), random.Random(setting.seed)
    whole, parts, repeats = setting.of((1000, (500, 600, 700, 800, 900), 7), (200, (100, 150), 1))
    rows = []
    with engine_on_device(shape, setting, device_rows=4 * whole, host_rows=8 * whole, max_batch=1) as engine:
        for known in parts:
            found: dict[str, list[float]] = {"computed": [], "whole": [], "layerwise": []}
            for _ in range(repeats + 1):
                found["computed"].append(asked(engine, words(rng, engine, whole), reuse=False).ttft)
                for way in ("whole", "layerwise"):
                    found[way].append(_turn(engine, rng, known, whole - known, way))
            ms = {way: statistics.median(samples[1:]) * 1e3 for way, samples in found.items()}
            rows.append(
                {
                    "history": known,
                    "new": whole - known,
                    **{f"{way}_ms": value for way, value in ms.items()},
                    "gain": ms["computed"] / ms["layerwise"],
                    "copy_ms": known * shape.kv_bytes_per_token("bfloat16") / ceilings.copy * 1e3,
                    "spread": spread(found["layerwise"][1:]),
                }
            )
    table(
        f"{shape.name}, time to the first token: computed, history loaded at once, and layer by layer (Fig. 18)", rows
    )
    goals = [
        goal(f"{r['history']}/{r['new']}: computed : reused", r["gain"], 1, least=True, spread=r["spread"])
        for r in rows
        if not setting.tiny
    ]
    return Found(rows, goals)


def _turn(engine: Engine, rng: random.Random, history: int, new: int, way: str) -> float:
    """Time a turn whose history is in host memory alone."""
    engine.baseline(preload="whole" if way == "whole" else "layerwise")
    text = words(rng, engine, history)
    asked(engine, text)
    engine.settle()
    engine.demote("host")
    turn = asked(engine, [*text, *words(rng, engine, new)])
    if turn.cached.host < history - 1:
        raise RuntimeError(f"{history} tokens of history were not reused from host memory: {turn.cached}")
    return turn.ttft


def preloading(setting: Setting, ceilings: Ceilings) -> Found:
    """Time the first token of a turn that waits for another request: 1,024 tokens of history, 100 new ones (figure 19)."""
    shape, rng = shape_of(MODEL, setting), random.Random(setting.seed)
    history, new, before, repeats = setting.of((1024, 100, 512, 7), (128, 20, 40, 1))
    variants: dict[str, tuple[Preload, ReadBuffer]] = {"no pre-loading": ("whole", None)}
    variants |= {f"PL-B{layers}": ("layerwise", layers) for layers in BUFFERS if layers <= shape.layers}
    variants["PL, auto"] = ("layerwise", "auto")
    found: dict[str, list[float]] = {name: [] for name in variants}
    with engine_on_device(
        shape, setting, device_rows=16 * history, host_rows=16 * history, max_batch=1, max_model_len=2 * history
    ) as engine:
        held = engine.parts.capacity.read_buffer_rows // history
        if held < shape.layers:
            raise RuntimeError(f"the read buffer holds {held} layers of the history, not all {shape.layers}")
        for _ in range(repeats + 1):
            for name, (way, layers) in variants.items():
                engine.baseline(preload=way, read_buffer=layers)
                text = words(rng, engine, history)
                asked(engine, text)
                engine.settle()
                engine.demote("host")
                first = ask(engine, words(rng, engine, before))
                then = ask(engine, [*text, *words(rng, engine, new)])
                first.ended.wait()
                then.ended.wait()
                if then.cached.host < history - 1:
                    raise RuntimeError(f"{name}: the history was not reused from host memory: {then.cached}")
                found[name].append(then.first - first.last)
    ms = {name: statistics.median(samples[1:]) * 1e3 for name, samples in found.items()}
    rows = [
        {
            "variant": name,
            "ms": value,
            "less": 1 - value / ms["no pre-loading"],
            "paper": PAPER_19.get(name, ""),
            "copy_ms": history * shape.kv_bytes_per_token("bfloat16") / ceilings.copy * 1e3,
            "spread": spread(found[name][1:]),
        }
        for name, value in ms.items()
    ]
    table(f"{shape.name}, {history} tokens of history in host memory, {new} new, after another request (Fig. 19)", rows)
    return Found(rows, [])


def saving(setting: Setting, ceilings: Ceilings) -> Found:
    """Time a prompt with 20 decoded tokens, and a request that waits, while rows are saved, before, and not at all (figure 20)."""
    shape, rng = shape_of(MODEL, setting), random.Random(setting.seed)
    prompts, decoded, repeats = setting.of(((1024, 1280, 1600), 20, 7), ((96,), 3, 1))
    rows: list[dict[str, Any]] = []
    with engine_on_device(
        shape, setting, device_rows=3 * prompts[-1], host_rows=4 * prompts[-1], max_batch=1
    ) as engine:
        for length in prompts:
            found: dict[str, list[float]] = {"off": [], "beside": [], "awaited": []}
            for _ in range(repeats + 1):
                for way, samples in found.items():
                    samples.append(_saved(engine, rng, length, decoded, way))
            ms = {way: statistics.median(samples[1:]) * 1e3 for way, samples in found.items()}
            rows.append(
                {
                    "prompt": length,
                    **{f"{way}_ms": value for way, value in ms.items()},
                    "beside_over_off": ms["beside"] / ms["off"],
                    "less_than_awaited": 1 - ms["beside"] / ms["awaited"],
                    "paper": "0.13-0.15",
                    "copy_ms": length * shape.kv_bytes_per_token("bfloat16") / ceilings.copy * 1e3,
                    "spread": spread(found["beside"][1:]),
                }
            )
    table(f"{shape.name}, a prompt with {decoded} tokens decoded and the next request's first token (Fig. 20)", rows)
    goals = [
        goal(f"prompt of {r['prompt']}: saved / not", r["beside_over_off"], 1.03, least=False, spread=r["spread"])
        for r in rows
        if not setting.tiny
    ]
    return Found(rows, goals)


def _saved(engine: Engine, rng: random.Random, length: int, decoded: int, way: str) -> float:
    """Time a job and the first token of the next one."""
    kept = way != "off"
    prompt, following = words(rng, engine, length), words(rng, engine, 64)
    first = ask(engine, prompt, decoded, reuse=kept)
    if way == "awaited":
        first.ended.wait()
        engine.settle()
    then = ask(engine, following, reuse=kept)
    then.ended.wait()
    taken = then.first - first.asked
    engine.settle()
    engine.reset_cache()
    engine.settle()
    return taken
