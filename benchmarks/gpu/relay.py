"""RelayAttention's operator (figures 1 and 5) and its serving of a shared system prompt (figures 6 and 8)."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from afterglow.bench.report import goal, interleaved, spread
from afterglow.bench.timed_requests import asked, words
from afterglow.choices import RelayMode
from afterglow.sim.operators.relay import printed_speedup
from benchmarks.gpu.models import engine_on_device, shape_of
from benchmarks.gpu.setting import DEVICE, DTYPE, Ceilings, Found, Setting, recorded, seconds, table
from benchmarks.papers.relay.lengths import fixed, sharegpt
from benchmarks.papers.relay.modelled import FIGURE_1, FIGURE_5, FIGURE_6, FIGURE_8
from benchmarks.papers.relay.operator import Batch
from benchmarks.papers.relay.shared_prompt import Workload, tokens_per_second

REQUESTS, CONTEXT = 32, 128
WANTED = 0.85  # of the gain that the paper's count of reads allows
SERVING: dict[str, tuple[RelayMode, bool]] = {  # relay, reuse
    "recompute": ("off", False),
    "shared": ("off", True),
    "relay": ("on", True),
}
APART = 0.02  # bfloat16 rounds numbers of about 1 to 2^-8, and each way rounds the parts' results, and sums of weights


def operator(setting: Setting, ceilings: Ceilings) -> Found:
    """Time one layer's attention of 32 requests, LLaMA-30B's heads: with copies of the prefix, with one copy that each reads, and
    read once; in CUDA graphs, and relay also launched by itself."""
    shape = shape_of("LLaMA-30B", setting)
    prefixes = setting.of(tuple(FIGURE_1), (64, 128))
    options = SimpleNamespace(
        seed=setting.seed, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim
    )  # fmt: skip
    rows, goals = [], []
    for prefix in prefixes:
        row = operator_row(options, prefix, setting, ceilings)
        rows.append(row)
        if prefix == 2048:
            name = "relay's gain, prefix of 2,048: of the count of reads (Fig. 5)"
            goals.append(goal(name, row["of_theory"], WANTED, least=True, spread=row["spread"]))
    table(f"attention of a layer, {REQUESTS} requests, {CONTEXT} tokens of their own, us; the paper's on an A40", rows)
    return Found(rows, goals)


def operator_row(options: Any, prefix: int, setting: Setting, ceilings: Ceilings) -> dict[str, Any]:
    """Time the ways in turns, in random order, and check that they agree."""
    with torch.no_grad():
        batch = Batch(options, REQUESTS, prefix, CONTEXT, DEVICE, DTYPE)
        ways = ("plain", "shared", "relay")
        for way in ways[1:]:
            torch.testing.assert_close(batch(way), batch("plain"), atol=APART, rtol=APART)
        repeats, times = setting.of((15, 10), (1, 1))
        graphs = {way: recorded(partial(batch, way), times) for way in ways}
        order = random.Random(f"{setting.seed} {prefix}")
        found = interleaved({way: partial(seconds, graphs[way]) for way in ways}, repeats, order)
        launched = [seconds(partial(batch, "relay"), times) for _ in range(repeats)]
    taken = {way: statistics.median(samples) / times for way, samples in found.items()}
    row_bytes = 2 * options.kv_heads * options.head_dim * DTYPE.itemsize
    theory = printed_speedup(REQUESTS, CONTEXT, prefix)
    gain = taken["plain"] / taken["relay"]
    papers_plain, papers_relay = FIGURE_1[prefix]
    return {
        "prefix": prefix,
        **{f"{way}_us": taken[way] * 1e6 for way in ways},
        "relay_launched_us": statistics.median(launched) * 1e6,
        "plain_bound_us": REQUESTS * (prefix + CONTEXT) * row_bytes / ceilings.memory * 1e6,
        "relay_bound_us": (prefix + REQUESTS * CONTEXT) * row_bytes / ceilings.memory * 1e6,
        "gain": gain,
        "theory": theory,
        "of_theory": gain / theory,
        "paper_plain_us": papers_plain,
        "paper_relay_us": papers_relay,
        "paper_theory": FIGURE_5.get(prefix, (None, None))[0],
        "paper_gain": FIGURE_5.get(prefix, (None, papers_plain / papers_relay))[1],
        "spread": max(spread(samples) for samples in found.values()),
    }


def throughput(setting: Setting, ceilings: Ceilings, system: int) -> Found:
    """Serve ShareGPT's lengths behind a system prompt (figure 6)."""
    paper = dict(zip(SERVING, FIGURE_6["A100-80G", system], strict=True))
    work = Workload("ShareGPT", 32, setting.of(system, 64), setting.of(64, 2), setting.of(sharegpt(1), fixed(9, 3)))
    rows = served(setting, ceilings, [work], paper)
    table("LLaMA-2-7B behind a system prompt, Fig. 6; the paper's requests per second on an A100-80G", rows)
    return Found(rows, [])


def lengths(setting: Setting, ceilings: Ceilings, system: int) -> Found:
    """Serve prompts and replies of fixed lengths behind a system prompt (figure 8)."""
    sizes = setting.of(((64, 128), (128, 256), (256, 512)), ((9, 3),))
    work = [Workload(f"{a}+{b}", 32, setting.of(system, 64), setting.of(32, 2), fixed(a, b)) for a, b in sizes]
    rows = served(setting, ceilings, work, {})
    if system == 2048:
        printed = dict(zip(SERVING, FIGURE_8, strict=True))
        for row in rows:
            row["paper"] = printed[row["way"]] if row["lengths"] == "256+512" else ""
    table("LLaMA-2-7B behind a system prompt, Fig. 8; the paper's requests per second on an A40", rows)
    return Found(rows, [])


def served(
    setting: Setting, ceilings: Ceilings, work: Sequence[Workload], paper: dict[str, float]
) -> list[dict[str, Any]]:
    """Serve workloads with one system prompt in each way, on one engine after the other. Of a request that recomputes the prompt,
    as of the others, weights are read at least once for each token of a whole batch: `bound`, in requests per second."""
    shape = shape_of("LLaMA-2-7B", setting)
    rows = []
    for way, (relay, reuse) in SERVING.items():
        rng = random.Random(setting.seed)
        room = setting.of(75_000, 32 * 256)
        options: dict[str, Any] = {"relay": relay, "max_batch": 32, "max_model_len": setting.of(4096, 256)}
        with engine_on_device(
            shape, setting, device_rows=room, host_rows=setting.of(16_000, 4_000), **options
        ) as engine:
            system = words(rng, engine, work[0].system)
            asked(engine, system)
            engine.settle()
            for each in work:
                requests = each.drawn(engine, rng, each.count, system)
                per_token = tokens_per_second(engine, requests, each.batch, reuse=reuse)
                mean = sum(reply for _, reply in requests) / len(requests)
                fastest = each.batch * ceilings.memory / (2 * shape.layer_parameters) / mean
                rows.append(
                    {
                        "lengths": each.name,
                        "system": each.system,
                        "way": way,
                        "tokens_per_s": per_token,
                        "requests_per_s": per_token / mean,
                        "bound": fastest,
                        "paper": paper.get(way, ""),
                    }
                )
    return rows
