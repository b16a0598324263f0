"""Times of a database of many maps: to search, to open and to fetch."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from afterglow.bench.report import interleaved, spread
from afterglow.memo.database import read_records
from afterglow.memo.maps import MAPS, Identity, MapStore, token_key
from afterglow.memo.vector_index import VectorIndex

SEARCHED, QUERIES = 100_000, 200
OPENED = 10_000
STORED, ASKED, NEIGHBOURS = 200, 16, 4  # sentences whose maps are read from disk


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
        "spread": round(spread(found["graph"]), 4),
        "agreement": float(agree / QUERIES),
    }
    print("search:", row)
    return row


def opening(count: int) -> dict[str, Any]:
    """Time opening a store and reading one record, after its writer has gone."""
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
        times = []
        for _ in range(3):
            began = time.perf_counter()
            store = MapStore.open(Path(folder))
            store.read(count // 2)
            times.append(time.perf_counter() - began)
            size = store.nbytes
            store.close()
        row = {
            "what": "opening",
            "sentences": count,
            "bytes": size,
            "seconds": round(statistics.median(times), 4),
            "spread": round(spread(times), 4),
        }
    print("opening:", row)
    return row


def fetching(count: int, seed: int) -> dict[str, Any]:
    """Maps of Llama-3-8B (32 tokens) from disk: four neighbours of each of 16 sentences, read and verified; what the kernel keeps
    of the file is dropped before. With and without asking for all of a batch's records ahead."""
    identity = Identity(
        model_digest="0" * 64,
        quantisation="float32",
        template="{text}",
        layers=32,
        heads=32,
        causal=True,
        dtype="float16",
    )
    random = np.random.default_rng(seed)
    maps = np.full((32, 32, 32, 32), 1 / 32, np.float32)
    asked = min(ASKED, count // NEIGHBOURS)
    with tempfile.TemporaryDirectory(dir=os.environ.get("AFTERGLOW_BENCH_DIR")) as folder:
        store = MapStore.create(Path(folder), identity)
        for number in range(count):
            store.append(maps, token_key([number]))
        store.close()
        file = os.open(Path(folder) / MAPS, os.O_RDONLY)
        os.fsync(file)
        store = MapStore.open(Path(folder))
        weights = np.full(NEIGHBOURS, 1 / NEIGHBOURS, np.float32)

        def once(*, cold: bool, ahead: bool) -> float:
            numbers = random.choice(count, (asked, NEIGHBOURS), replace=False)
            if cold:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            if ahead:
                store.prefetch(numbers.ravel())
            for row in numbers:
                read_records(store, row, weights)
            return time.perf_counter() - began

        # Pages that this process has mapped stay: each round opens the store anew.
        def opened(*, cold: bool, ahead: bool) -> float:
            nonlocal store
            store.close()
            store = MapStore.open(Path(folder))
            return once(cold=cold, ahead=ahead)

        found = interleaved(
            {
                "warm": lambda: opened(cold=False, ahead=False),
                "cold": lambda: opened(cold=True, ahead=False),
                "ahead": lambda: opened(cold=True, ahead=True),
            },
            5,
        )
        store.close()
        os.close(file)
    row = {"what": "fetching", "stored": count, "bytes_a_sentence": NEIGHBOURS * identity.record_bytes(32)}
    row |= {f"{name}_ms_a_sentence": round(1e3 * statistics.median(times) / asked, 3) for name, times in found.items()}
    print("fetching:", row)
    return row
