"""One layer of large models, with random weights: what hits save, and what looking up costs."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from afterglow.bench.report import goal, interleaved, show
from afterglow.memo.attend import MapsAttend
from afterglow.memo.database import Fetched
from afterglow.memo.index import VectorIndex
from afterglow.memo.maps import Identity, MapStore, token_key
from afterglow.memo.packing import pack
from afterglow.memo.projector import Projector, ProjectorSpec
from afterglow.model.decoder import Decoder
from afterglow.model.encoder import BatchAttend
from afterglow.model.families import Names
from afterglow.model.spec import ModelSpec, RopeSpec
from afterglow.model.weights import Assembler
from attncache_parts.measures import now

# hidden, heads, kv heads, ffn, layers, rotary base
MODELS = {
    "Llama-2-7B": (4096, 32, 32, 11008, 32, 10000.0),
    "Llama-3-8B and Mistral-7B": (4096, 32, 8, 14336, 32, 500000.0),  # alike but for the rotary base
}
LENGTHS = (16, 32, 64, 128)
RATES = (0.3, 0.7, 1.0)
SENTENCES = 10
VOCAB = 64
SEARCHED, QUERIES = 100_000, 200
OPENED = 10_000


def measure(*, quick: bool, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and goals."""
    rows: list[dict[str, Any]] = []
    for name in list(MODELS)[: 1 if quick else None]:
        layer = one_layer(name, seed)
        for length in (32,) if quick else LENGTHS:
            rows += attention(name, layer, length, 3 if quick or length > 32 else 5, seed)
            print(*rows[-len(RATES) :], sep="\n", flush=True)
        del layer
    show(
        "one layer, time of the full computation over that with maps",
        ("model", "tokens", "hit rate", "attention", "layer", "search, share of all layers"),
        [
            [r["model"], r["tokens"], r["hit_rate"], r["attention"], r["layer"], f"{r['lookup_share']:.2%}"]
            for r in rows
        ],
    )
    others = [searching(10_000 if quick else SEARCHED, seed), opening(1_000 if quick else OPENED)]
    goals = []
    at = {r: [row["attention"] for row in rows if row["hit_rate"] == r] for r in RATES}
    for rate, wanted in ((0.3, 1.2), (0.7, 1.2), (1.0, 1.8)):
        goals.append(
            goal(f"attention speed-up at a hit rate of {rate:g}", statistics.median(at[rate]), wanted, least=True)
        )
    goals.append(
        goal("search and projection, share of a pass", max(r["lookup_share"] for r in rows), 0.02, least=False)
    )
    goals.append(goal(f"search of {others[0]['vectors']:,} vectors, ms", others[0]["median_ms"], 0.5, least=False))
    goals.append(
        goal(f"opening a store of {others[1]['sentences']:,} sentences, s", others[1]["seconds"], 1.0, least=False)
    )
    return rows + others, goals


def one_layer(name: str, seed: int) -> Decoder:
    """Layer 0 of a model as a model of its own."""
    hidden, heads, kv_heads, ffn, _, base = MODELS[name]
    spec = ModelSpec(
        family="llama",
        layers=1,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=VOCAB,
        max_positions=4096,
        rope=RopeSpec(dim=hidden // heads, base=base),
        tied_embeddings=True,
    )
    return Assembler(spec, Names(), Repeated(seed), torch.float32, torch.device("cpu")).decoder()


class Repeated:
    """Weights of a few random numbers over and over: only their shapes matter here, and billions take long to draw."""

    def __init__(self, seed: int) -> None:
        self._block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed)) * 0.02

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        return self._block.repeat(-(-size // len(self._block)))[:size].view(shape)


def attention(name: str, model: Decoder, length: int, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Ten sentences, of which some have maps in half precision, packed as in the store. Attention is queries, keys, values,
    their product and the output projection; a layer is that and the MLP."""
    generator = torch.Generator().manual_seed(seed)
    layer = model.layers[0]
    x = torch.randn(SENTENCES * length, model.spec.hidden, generator=generator)
    positions, lengths = torch.arange(length).repeat(SENTENCES), [length] * SENTENCES
    scores = torch.randn(SENTENCES, 1, model.spec.heads, length, length, generator=generator)
    maps = scores.masked_fill_(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
    packed = torch.from_numpy(pack(maps.numpy(), causal=True)).half()
    inputs = x.view(SENTENCES, length, -1)
    projector, index = Projector(ProjectorSpec("positions", model.spec.hidden, length)), VectorIndex()
    random = np.random.default_rng(seed)
    known = projector.project(inputs).numpy().repeat(100, 0)
    index.put(length, np.arange(len(known)), known + random.normal(size=known.shape).astype(np.float32))

    def once(rate: float | None) -> float:
        began = now()
        if rate is None:
            layer.out(BatchAttend(model, positions, lengths)(0, layer.attention, x))
        else:
            attend = MapsAttend(model, positions, lengths)
            hits = np.zeros((SENTENCES, 1), bool)
            hits[: round(rate * SENTENCES)] = True
            attend.use([Fetched(packed, torch.arange(SENTENCES))], hits)
            layer.out(attend(0, layer.attention, x))
        return now() - began

    def mlp() -> float:
        began = now()
        model._mlp(layer, x)
        return now() - began

    def look_up() -> float:
        began = now()
        index.search(length, projector.project(inputs).numpy())
        return now() - began

    with torch.inference_mode():
        variants = {"full": lambda: once(None), "mlp": mlp, "look up": look_up}
        variants |= {str(rate): (lambda r=rate: once(r)) for rate in RATES}
        for variant in variants.values():
            variant()
        found = {key: np.array(times) for key, times in interleaved(variants, repeats).items()}
    share = float(np.median(found["look up"] / (found["full"] + found["mlp"]))) / MODELS[name][4]
    return [
        {
            "model": name,
            "tokens": length,
            "hit_rate": rate,
            "attention": round(float(np.median(found["full"] / found[str(rate)])), 3),
            "layer": round(float(np.median((found["full"] + found["mlp"]) / (found[str(rate)] + found["mlp"]))), 3),
            "lookup_share": round(share, 6),
        }
        for rate in RATES
    ]


def searching(count: int, seed: int) -> dict[str, Any]:
    """The nearest of many vectors of 128 numbers, one query at a time. They are drawn around 1,000 centres: vectors without
    any structure have no near neighbours, and say nothing about a search for them."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(1000, 128))
    vectors = (centres[random.integers(0, 1000, count)] + random.normal(size=(count, 128)) * 0.3).astype(np.float32)
    queries = vectors[random.integers(0, count, QUERIES)] + random.normal(size=(QUERIES, 128)).astype(np.float32) * 0.1
    index, exact = VectorIndex(approximate_from=1), VectorIndex(approximate_from=count + 1)
    for one in (index, exact):
        one.put(32, np.arange(count), vectors)
    found: dict[str, list[float]] = {"graph": [], "exact": []}
    agree = 0
    for query in queries:
        answers = []
        for name, one in (("graph", index), ("exact", exact)):
            began = time.perf_counter()
            answers.append(one.search(32, query[None])[1][0, 0])
            found[name].append(time.perf_counter() - began)
        agree += answers[0] == answers[1]
    row = {
        "what": "search",
        "vectors": count,
        "graph": not index.notes,
        "median_ms": round(1e3 * statistics.median(found["graph"]), 4),
        "exact_ms": round(1e3 * statistics.median(found["exact"]), 4),
        "agreement": float(agree / QUERIES),
    }
    print("search:", row)
    return row


def opening(count: int) -> dict[str, Any]:
    """Opening a store, and reading one record of it, after its writer has gone."""
    identity = Identity(
        model_digest="0" * 64,
        quantisation="float32",
        template="{text}",
        layers=6,
        heads=12,
        causal=False,
        dtype="float16",
    )
    maps = np.full((6, 12, 12, 12), 1 / 12, np.float32)
    with tempfile.TemporaryDirectory() as folder:
        store = MapStore.create(Path(folder), identity)
        for number in range(count):
            store.append(maps, token_key([number]))
        store.close()
        began = time.perf_counter()
        store = MapStore.open(Path(folder))
        store.read(count // 2)
        row = {
            "what": "opening",
            "sentences": count,
            "bytes": store.nbytes,
            "seconds": round(time.perf_counter() - began, 4),
        }
        store.close()
    print("opening:", row)
    return row
