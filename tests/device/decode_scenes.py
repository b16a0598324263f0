"""Steps that decode alone, by passes that are recorded, replayed, and launched before the plan asks for them. With Triton's kernels."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from afterglow.engine import prefill_pass, static_pass
from afterglow.engine.engine import Engine
from afterglow.kernels import device_experts
from afterglow.request import Output, Request, SamplingParams
from tests.device.scenes import draw, load
from tests.doors import gathered_by_torch, held_bytes
from tests.engine.conftest import FAMILIES, write_model
from tests.faults.harness import flip, small_pieces
from tests.model.families_hf import save_mxfp4

HEAD = 4096  # bytes of an extent's file
LAUNCHED = ("launches", "graphs", "synchronisations", "copies to device", "copies to host", "pinned allocations")


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **more)


def answers(engine: Engine, asked: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    requests = [Request(f"p{draw(len(prompt), 1)}{i}", prompt, how) for i, (prompt, how) in enumerate(asked)]
    return [list(each.tokens) for each in engine.generate(requests)]


def result(engine: Engine, found: list[Any]) -> Any:
    from tests.device.watching import watch

    engine.close()
    passes = engine.parts.runner.passes
    asked = {key: watch.counts[key] for key in ("graphs", "recordings")}
    return {"answers": found, "counts": {**(passes.counts if passes else {}), **asked}, "races": watch.races}


def passes(device: str, folder: Path) -> Any:
    """Replies of many lengths, that end with a token, that are drawn by a seed, that share rows, that want log-probabilities; and next
    turns, which find the rows of replies on the device and in host memory."""
    engine = load(device, folder, relay="on", max_batch=6)
    prefix = draw(1, 140)
    first = answers(engine, [([*prefix, *draw(10 + i, 3 + i)], greedy(4 + 7 * i)) for i in range(4)])
    found = list(first)
    stop = first[3][7]
    seeded = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
    kinds = [greedy(30, stop_token_ids=(stop,)), seeded, greedy(16, repetition_penalty=1.3)]
    found += answers(engine, [([*prefix, *draw(13 + i, 6)], how) for i, how in enumerate(kinds)])
    for tier in ("device", "host"):
        engine.settle()
        if tier != "device":
            engine.demote(tier)
        turns = [[*prefix, *draw(10 + i, 3 + i), *first[i], *draw(40 + i, 4)] for i in range(2)]
        found += answers(engine, [(turn, greedy(4 + i)) for i, turn in enumerate(turns)])
    found += answers(engine, [(draw(90, 20), greedy(5, logprobs=2)), (draw(91, 21), greedy(5))])
    return result(engine, found)


def racing(device: str, folder: Path) -> Any:
    """Two replies whose rows leave for host memory, and a next turn behind them."""
    from tests.device.watching import watch

    watch.racing = device == "cuda"
    engine = load(device, folder, relay="off", max_batch=2)
    if watch.racing:
        watch.look_for_races()
    prompts = [draw(1, 20), draw(2, 9)]
    found = answers(engine, [(prompt, greedy(18 + i)) for i, prompt in enumerate(prompts)])
    engine.settle()
    engine.demote("host")
    found += answers(engine, [([*prompts[0], *found[0], 7], greedy(3))])
    return result(engine, found)


def launches(device: str, folder: Path) -> Any:
    """What the device is asked for by steps that decode, of two requests and of eight."""
    from tests.device.watching import watch

    engine = load(device, folder, relay="off", speculate="off", max_batch=8)
    found = []
    for batch in (2, 8):
        answers(engine, [(draw(batch + i, 3), greedy(8)) for i in range(batch)])
        steps = [step.counts for step in watch.steps if step.runs == step.rows == batch]
        found.append([[step[what] for what in LAUNCHED] for step in steps[-4:-1]])
    engine.settle()
    engine.demote("host")
    recorded = [step.counts["synchronisations"] for step in watch.steps if step.counts["recordings"]]
    return {"held": held_bytes(engine.parts.runner), **result(engine, []), "steps": found, "recorded": recorded}


def engines(device: str, folder: Path) -> Any:
    """Two engines in one process, of which each decodes: in how many streams graphs were recorded."""
    from tests.device.graphs import CUDAGraph

    loaded = [load(device, folder / name, relay="off", max_batch=1) for name in "ab"]
    for engine in loaded:
        answers(engine, [(draw(1, 3), greedy(6))])
    for engine in loaded:
        engine.close()
    return [len(CUDAGraph.streams), len(set(CUDAGraph.streams.values()))]


def coming(device: str, folder: Path) -> Any:
    """Requests that come while others decode, and one that is cancelled: what was launched ahead is of no use then."""
    engine = load(device, folder, relay="off", max_batch=3)
    found: dict[str, list[int]] = {}
    begun, ended = threading.Event(), threading.Semaphore(0)

    def told(output: Output) -> None:
        found.setdefault(output.request_id, []).extend(output.tokens)
        if len(found[output.request_id]) >= 6:
            begun.set()
        if output.finish_reason is not None:
            ended.release()

    engine.submit(Request("a", draw(1, 9), greedy(60)), told)
    assert begun.wait(60)
    for i, name in enumerate("bcd"):
        engine.submit(Request(name, draw(20 + i, 70), greedy(10 + i)), told)
    engine.submit(Request("gone", draw(7, 30), greedy(200)), told)
    assert ended.acquire(timeout=60)
    engine.cancel("gone")
    assert all(ended.acquire(timeout=60) for _ in range(4))
    return result(engine, [found[name] for name in "abcd"])


def staggered(device: str, folder: Path) -> Any:
    """Requests that begin four steps one after another: the rows of each one that wait to leave are a block at another step."""
    engine = load(device, folder, relay="off", speculate="off", max_batch=3)
    requests = [Request(f"p{i}", draw(60 + i, 5 + i), greedy(28 - 4 * i)) for i in range(3)]
    found: dict[str, list[int]] = {}
    ended = threading.Semaphore(0)

    def told(output: Output) -> None:
        found.setdefault(output.request_id, []).extend(output.tokens)
        if len(found[output.request_id]) == 4 and len(found) < len(requests):
            engine.submit(requests[len(found)], told)
        if output.finish_reason is not None:
            ended.release()

    engine.submit(requests[0], told)
    assert all(ended.acquire(timeout=120) for _ in requests)
    return result(engine, [found[request.id] for request in requests])


def windows(device: str, folder: Path) -> Any:
    """A model with layers that hold the last rows alone."""
    model = write_model(
        {**FAMILIES["ministral"], "sliding_window": 48, "vocab_size": 256}, folder.parent / f"{folder.name}-model"
    )
    engine = load(device, folder, model, relay="on", max_batch=4)
    prefix = draw(1, 100)
    found = answers(engine, [([*prefix, *draw(10 + i, 3 + i)], greedy(10 + 20 * i)) for i in range(2)])
    return result(engine, found)


def refused(device: str, folder: Path) -> Any:
    """A device that records no graph, and then kernels that fail."""
    engine = load(device, folder, relay="on", max_batch=4)

    def fails(graph: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture (made up)")

    prompts = [(draw(30 + i, 20), greedy(12)) for i in range(2)]
    with mock.patch.object(torch.cuda.CUDAGraph, "capture_begin", fails):
        found = answers(engine, prompts)
    with mock.patch.object(static_pass.DeviceReads, "attend", return_value=False):
        found += answers(engine, [(draw(50 + i, 20), greedy(12)) for i in range(3)])
    found += answers(engine, prompts)
    return result(engine, found)


def no_memory_to_record(device: str, folder: Path) -> Any:
    """A device whose memory runs out when the first graph is recorded: a few passes later there is enough."""
    from tests.device.watching import watch

    engine = load(device, folder, relay="off", max_batch=2)
    attend = static_pass.DeviceReads.attend

    def runs_out(self: static_pass.DeviceReads, *reading: Any) -> bool:
        if watch.recorded is not None and watch.counts["recordings"] == 1:
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return attend(self, *reading)

    with mock.patch.object(static_pass.DeviceReads, "attend", runs_out), mock.patch.object(static_pass, "AGAIN", 5):
        found = answers(engine, [(draw(70 + i, 9), greedy(24)) for i in range(2)])
    return result(engine, found)


def experts(device: str, folder: Path) -> Any:
    """Mixtures of experts, without a shared one and with one, and with biases and clamped gates: replies, and what the device is asked for
    by steps of two requests and of four."""
    from tests.device.watching import watch

    found, steps = [], []
    for family in ("mixtral", "qwen2_moe", "gpt_oss"):
        model = write_model({**FAMILIES[family], "vocab_size": 256}, folder / family)
        engine = load(device, folder / "cache", model, relay="off", max_batch=4, speculate="off")
        for batch in (2, 4) if family == "mixtral" else (2,):
            found += answers(engine, [(draw(batch + i, 3 + i), greedy(8)) for i in range(batch)])
            decoding = [step.counts for step in watch.steps if step.runs == step.rows == batch]
            steps.append([[step[what] for what in LAUNCHED] for step in decoding[-3:-1]])
        ended = result(engine, found)
    return {**ended, "steps": steps}


def experts_in_blocks(device: str, folder: Path) -> Any:
    """A mixture of experts in MXFP4, which a CPU computes with the weights that are meant: replies, and what steps ask for."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.device.watching import watch

    config = {**FAMILIES["gpt_oss"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 32}
    torch.manual_seed(7)
    save_mxfp4(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)), folder / "model")
    kept = "auto" if device == "cuda" else "none"
    options: dict[str, Any] = {"max_batch": 2, "speculate": "off", "quantization": kept}
    engine = load(device, folder / "cache", folder / "model", relay="off", **options)
    found = answers(engine, [(draw(i, 3 + i), greedy(8)) for i in range(2)])
    decoding = [step.counts for step in watch.steps if step.runs == step.rows == 2]
    return {**result(engine, found), "steps": [[step[what] for what in LAUNCHED] for step in decoding[-3:-1]]}


def more_than_experts_take(device: str, folder: Path) -> Any:
    """A mixture of experts: two requests, where kernels find the experts of one row alone, and how often their steps wait; then one
    request, and what its steps ask for."""
    from tests.device.watching import watch

    model = write_model({**FAMILIES["mixtral"], "vocab_size": 256}, folder / "model")
    with mock.patch.object(device_experts, "MOST_ROWS", 1):
        engine = load(device, folder / "cache", model, relay="off", max_batch=2, speculate="off")
        found = answers(engine, [(draw(i, 3 + i), greedy(5)) for i in range(2)])
        found += answers(engine, [(draw(8, 3), greedy(5))])
        one, two = ([step.counts for step in watch.steps if step.runs == step.rows == batch] for batch in (1, 2))
        asked = [[step[what] for what in LAUNCHED] for step in one[-3:-1]]
        return {**result(engine, found), "steps": asked, "waits": [step["synchronisations"] for step in two]}


def damage(folder: Path) -> None:
    """Change a bit of all extents, in the first key of the second layer of two."""
    for file in folder.rglob("*.safetensors"):
        flip(file, HEAD + (file.stat().st_size - HEAD) // 2)


def prefills(device: str, folder: Path) -> Any:
    """Prompts of some lengths, next turns behind rows from all tiers and behind rows that are shared, prompts beside replies, and one with
    log-probabilities: steps that passes of few rows are recorded for."""
    from tests.device.watching import watch

    watch.racing = device == "cuda"
    few = mock.patch.object(prefill_pass, "ROWS", (8, 16, 32)), mock.patch.object(prefill_pass, "LAYERS", 1)
    with few[0], few[1], gathered_by_torch():
        engine = load(device, folder, relay="on", max_batch=3, prefill_chunk=16, speculate="off")
        if watch.racing:
            watch.look_for_races()
        prefix = draw(1, 26)
        found = answers(engine, [(prefix, greedy(1))])
        found += answers(engine, [([*prefix, *draw(10 + i, 6)], greedy(2)) for i in range(3)])
        for tier in ("host", "disk", "device"):
            engine.settle()
            assert engine.stats().plan.saves_in_flight == 0, "rows that leave are not handed over"
            if tier != "device":
                engine.demote(tier)
            found += answers(engine, [([*prefix, *draw(10, 6), *draw(20 + len(found), 7)], greedy(2))])
        found += answers(engine, [(draw(30, 11), greedy(2)), (draw(31, 5), greedy(17)), (draw(32, 13), greedy(2))])
        found += answers(engine, [(draw(33, 12), greedy(2, prompt_logprobs=1))])
        engine.settle()
        engine.demote("disk")
        damage(folder)
        with small_pieces():
            found += answers(engine, [([*prefix, *draw(12, 6), 5], greedy(2)), (draw(34, 9), greedy(2))])
        counts = dict(engine.parts.runner.prefills.counts) if device == "cuda" else {}
        return {**result(engine, found), "prefills": counts}


def halves(device: str, folder: Path) -> Any:
    """Prompts whose rows leave from memory that the last but one graph's rows have left."""
    from tests.device.watching import watch

    watch.racing = device == "cuda"
    model = write_model({**FAMILIES["llama"], "num_hidden_layers": 3, "vocab_size": 256}, folder / "model")
    with mock.patch.object(prefill_pass, "LAYERS", 1):
        engine = load(device, folder, model, relay="off", max_batch=1, speculate="off")
        if watch.racing:
            watch.look_for_races()
        return result(engine, answers(engine, [(draw(i, 7), greedy(1)) for i in range(3)]))


def evicted(device: str, folder: Path) -> Any:
    """Prompts of two sizes in turn, where the passes of one are kept, and no reply has one: all graphs go before others are recorded."""
    with mock.patch.object(prefill_pass, "MOST_PASSES", 1), mock.patch.object(prefill_pass, "LAYERS", 1):
        engine = load(device, folder, relay="off", max_batch=1, speculate="off")
        return result(engine, answers(engine, [(draw(i, 7 + 8 * (i // 2 % 2)), greedy(1)) for i in range(6)]))
