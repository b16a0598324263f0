"""One layer of large models, with random weights: what hits save, and what looking up costs."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from afterglow.bench.report import goal, interleaved, show, spread
from afterglow.choices import QuantizationName
from afterglow.memo.database import Fetched
from afterglow.memo.map_attention import MapsAttend
from afterglow.memo.projector import Projector, ProjectorSpec
from afterglow.memo.vector_index import VectorIndex
from afterglow.model.encoder import BatchAttend, Model
from afterglow.model.keeping import Keeping
from afterglow.model.linear import int8_levels
from benchmarks.papers.attncache.database_times import OPENED, SEARCHED, STORED, fetching, opening, searching
from benchmarks.papers.attncache.measures import now
from benchmarks.papers.attncache.random_models import SHAPES, random_maps, random_model

TABLE_1 = ("Llama-2-7B", "Llama-3-8B and Mistral-7B")
TABLE_2 = "Llama-3.2-3B"
WEIGHTS: tuple[QuantizationName, ...] = ("none", "int8")
KEPT = {"none": "float32", "int8": "int8"}
LENGTHS = (16, 32, 64, 128)
RATES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
SENTENCES = 10
DROPPED = 4  # of Llama-3.2-3B's 28 layers


def measure(*, quick: bool, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and goals."""
    weights = [one for one in WEIGHTS if one == "none" or int8_levels()]
    rows: list[dict[str, Any]] = []
    for name in TABLE_1[: 1 if quick else None]:
        for kept in weights:
            layer = random_model(name, seed, kept, layers=1)
            for length in (32,) if quick else LENGTHS:
                rows += attention(name, layer, length, 3 if quick or length > 32 else 5, seed)
                print(*rows[-len(RATES) :], sep="\n", flush=True)
            del layer
    show(
        "one layer, time of the full computation over that with maps; what the operation counts allow",
        ("model", "weights", "tokens", "hit rate", "attention", "allowed", "layer", "search, share of all layers"),
        [
            [
                *(r[c] for c in ("model", "weights", "tokens", "hit_rate", "attention", "allowed", "layer")),
                f"{r['lookup_share']:.2%}",
            ]
            for r in rows
        ],
    )
    second = table_2(weights, 3 if quick else 5, seed)
    show(
        f"{TABLE_2}: table 2",
        ("method", "weights", "attention", "whole"),
        [[r["method"], r["weights"], r["attention"], r["whole"]] for r in second],
    )
    others = [searching(10_000 if quick else SEARCHED, seed), opening(1_000 if quick else OPENED)]
    others.append(fetching(20 if quick else STORED, seed))
    goals = []
    plain = [row for row in rows if row["weights"] == "float32"]
    for rate, wanted in ((0.3, 1.2), (0.5, 1.2), (0.9, 1.2), (1.0, 1.8)):
        chosen = [row for row in plain if row["hit_rate"] == rate]
        allowed = statistics.median(row["allowed"] for row in chosen)
        goals.append(
            goal(
                f"attention speed-up at a hit rate of {rate:g} (operation counts allow {allowed:.2f})",
                statistics.median(row["attention"] for row in chosen),
                wanted,
                least=True,
                spread=max(row["spread"] for row in chosen),
            )
        )
    slowest = max(rows, key=lambda row: row["lookup_share"])
    search, opened = others[0], others[1]
    judged = [
        ("search and projection, share of a pass", slowest["lookup_share"], 0.02, slowest["lookup_spread"]),
        (f"search of {search['vectors']:,} vectors, ms", search["median_ms"], 0.5, search["spread"]),
        (f"opening a store of {opened['sentences']:,} sentences, s", opened["seconds"], 1.0, opened["spread"]),
    ]
    goals += [goal(name, value, wanted, least=False, spread=apart) for name, value, wanted, apart in judged]
    return rows + second + others, goals


def allowed(name: str, length: int, rate: float) -> float:
    """See `allowed_by`."""
    hidden, heads, kv_heads = SHAPES[name][:3]
    return allowed_by(hidden, heads, kv_heads, length, rate)


def allowed_by(hidden: int, heads: int, kv_heads: int, length: int, rate: float) -> float:
    """What the multiplications of attention allow at a hit rate: a hit has values, map x values and the output projection left
    of queries, keys, values, queries x keys, map x values and the output projection. Exponentials, rotation and moving rows
    about are not counted, nor looking up."""
    head_dim = hidden // heads
    queries, values, core = hidden * heads * head_dim, hidden * kv_heads * head_dim, length * heads * head_dim
    hit = values + core + queries
    return 1 / (1 - rate + rate * hit / (hit + queries + values + core))


class Batch:
    """Ten sentences in one layer; some have maps in half precision, packed as in the store. Nothing waits for a device."""

    def __init__(self, model: Model, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model, self.layer = model, model.layers[0]
        x = torch.randn(SENTENCES * length, model.spec.hidden, generator=generator)
        self.x = x.to(model.device, model.dtype)
        self._positions = torch.arange(length).repeat(SENTENCES).to(model.device)
        self._lengths = [length] * SENTENCES
        self._maps = random_maps(model, SENTENCES, length, generator)

    def attention(self, rate: float | None) -> float:
        """Seconds of queries, keys, values, their product and the output projection, at a hit rate or without maps."""
        began = now()
        if rate is None:
            attend: BatchAttend | MapsAttend = BatchAttend(self.model, self._positions, self._lengths)
        else:
            hits = np.zeros((SENTENCES, 1), bool)
            hits[: round(rate * SENTENCES)] = True
            attend = MapsAttend(self.model, self._positions, self._lengths)
            attend.use([Fetched.own(self._maps)], hits)
        self.layer.out(attend(0, self.layer.attention, self.x))
        return now() - began

    def mlp(self) -> float:
        """Seconds of the rest of the layer, but for norms."""
        began = now()
        self.layer.mlp(self.x)
        return now() - began


def attention(name: str, model: Model, length: int, repeats: int, seed: int) -> list[dict[str, Any]]:
    """A row for each hit rate."""
    batch = Batch(model, length, seed)
    inputs = batch.x.view(SENTENCES, length, -1)
    projector, index = Projector(ProjectorSpec("positions", model.spec.hidden, length)), VectorIndex()
    random = np.random.default_rng(seed)
    known = projector.project(inputs).numpy().repeat(100, 0)
    index.put(length, np.arange(len(known)), known + random.normal(size=known.shape).astype(np.float32))

    def look_up() -> float:
        began = now()
        index.search(length, projector.project(inputs).numpy())
        return now() - began

    with torch.inference_mode():
        variants: dict[str, Callable[[], float]] = {
            "full": lambda: batch.attention(None),
            "mlp": batch.mlp,
            "look up": look_up,
        }
        variants |= {str(rate): functools.partial(batch.attention, rate) for rate in RATES}
        for first in ("full", "look up", str(RATES[0])):
            variants[first]()
        found = {key: np.array(times) for key, times in interleaved(variants, repeats).items()}
    share = float(np.median(found["look up"] / (found["full"] + found["mlp"]))) / SHAPES[name][4]
    return [
        {
            "model": name,
            "weights": KEPT[model.quantization],
            "tokens": length,
            "hit_rate": rate,
            "attention": round(float(np.median(found["full"] / found[str(rate)])), 3),
            "allowed": round(allowed(name, length, rate), 3),
            "layer": round(float(np.median((found["full"] + found["mlp"]) / (found[str(rate)] + found["mlp"]))), 3),
            "lookup_share": round(share, 6),
            "spread": round(spread(list(found["full"] / found[str(rate)])), 4),
            "lookup_spread": round(spread(list(found["look up"])), 4),
            "seconds": round(float(np.median(found["full"])), 4),
        }
        for rate in RATES
    ]


def table_2(weights: Sequence[QuantizationName], repeats: int, seed: int) -> list[dict[str, Any]]:
    """Attention left out of some layers, layers left out, weights of fewer bits, and maps, at 32 tokens: one layer of each kind
    in turns, added up to the model's 28. The base is float32 with all layers."""
    layers, kept, dropped = SHAPES[TABLE_2][4], SHAPES[TABLE_2][4] - DROPPED, DROPPED
    batches = {KEPT[one]: Batch(random_model(TABLE_2, seed, one, layers=1), 32, seed) for one in weights}
    four = FourBit(batches["float32"].x)
    variants: dict[str, Callable[[], float]] = {}
    for name, batch in batches.items():
        variants[f"{name} attention"] = functools.partial(batch.attention, None)
        variants[f"{name} mlp"] = batch.mlp
        for rate in (0.3, 0.9):
            variants[f"{name} {rate}"] = functools.partial(batch.attention, rate)
    if four.works:
        variants["4-bit products"] = four.products
        variants["float32 products"] = four.plain
    with torch.inference_mode():
        for variant in variants.values():
            variant()
        t = {key: np.array(times) for key, times in interleaved(variants, repeats).items()}
    attention_of = {name: t[f"{name} attention"] for name in batches}
    mlp_of = {name: t[f"{name} mlp"] for name in batches}
    base_attention, base = layers * attention_of["float32"], layers * (attention_of["float32"] + mlp_of["float32"])
    rows: list[dict[str, Any]] = []

    def add(method: str, name: str, taken: np.ndarray, whole: np.ndarray) -> None:
        rows.append(
            {
                "what": "table 2",
                "model": TABLE_2,
                "method": method,
                "weights": name,
                "attention": round(float(np.median(base_attention / taken)), 3),
                "whole": round(float(np.median(base / whole)), 3),
            }
        )

    for name, attended in attention_of.items():
        mlp = mlp_of[name]
        add("full", name, layers * attended, layers * (attended + mlp))
        add(f"AttnDrop, {dropped} of {layers}", name, kept * attended, kept * attended + layers * mlp)
        add(f"BlockDrop, {dropped} of {layers}", name, kept * attended, kept * (attended + mlp))
        for rate in (0.3, 0.9):
            own = t[f"{name} {rate}"]
            add(f"AttnCache, hit rate {rate}", name, layers * own, layers * (own + mlp))
    if four.works:
        ratio = round(float(np.median(t["float32 products"] / t["4-bit products"])), 3)
        rows.append(
            {
                "what": "table 2",
                "model": TABLE_2,
                "method": "products alone",
                "weights": "4-bit",
                "attention": ratio,
                "whole": ratio,
            }
        )
    return rows


class FourBit:
    """A layer's matrix products with torch's own 4-bit weights on CPU (bfloat16, groups of 64), and with float32's."""

    def __init__(self, x: torch.Tensor) -> None:
        """`x` [rows, hidden]."""
        hidden, heads, kv_heads, ffn = SHAPES[TABLE_2][:4]
        head_dim = hidden // heads
        shapes = [
            ((heads + 2 * kv_heads) * head_dim, hidden),
            (hidden, heads * head_dim),
            (2 * ffn, hidden),
            (hidden, ffn),
        ]
        generator = torch.Generator().manual_seed(0)
        self._inputs = [x.repeat(1, -(-inputs // x.shape[1]))[:, :inputs].contiguous() for _, inputs in shapes]
        self._narrow = [one.bfloat16() for one in self._inputs]
        make = Keeping(torch.float32, torch.device("cpu"))
        self._plain = [make(torch.randn(shape, generator=generator) * 0.02, None) for shape in shapes]
        self._packed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.works = True
        try:
            for outputs, inputs in shapes:
                numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32, generator=generator)
                packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 2)
                self._packed.append((packed, torch.full((inputs // 64, outputs, 2), 0.01, dtype=torch.bfloat16)))
            self.products()
        except (RuntimeError, AttributeError, NotImplementedError):
            self.works = False  # not in this torch, or not on this processor

    def products(self) -> float:
        """Seconds with 4 bits."""
        began = now()
        for x, (packed, scales) in zip(self._narrow, self._packed, strict=True):
            torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 64, scales)
        return now() - began

    def plain(self) -> float:
        """Seconds with float32."""
        began = now()
        for x, matrix in zip(self._inputs, self._plain, strict=True):
            matrix(x)
        return now() - began
