"""Nearest feature vectors among sentences of equal length: exact while they are few, HNSW (Faiss) from 20,000 on."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]

APPROXIMATE_FROM: Final = 20_000  # entries of one length
LINKS, BUILD_EFFORT, SEARCH_EFFORT = 32, 200, 64  # HNSW's M, efConstruction, efSearch
WITHOUT_FAISS = (
    "{count} sentences have {tokens} tokens, and Faiss is not there to index them: searching them all takes "
    "longer; pip install faiss-cpu brings it"
)


class VectorIndex:
    """Vectors by record number, apart for each length: no search ever sees a sentence of another length."""

    def __init__(self, folder: Path | None = None, *, approximate_from: int = APPROXIMATE_FROM) -> None:
        """`folder`: where graphs are kept that took long to build."""
        self._folder, self._from = folder, approximate_from
        self._numbers: dict[int, Numbers] = {}
        self._vectors: dict[int, Floats] = {}
        self._squares: dict[int, Floats] = {}
        self._graphs: dict[int, Any] = {}
        self.notes: list[str] = []  # what the operator should know

    def contents(self) -> tuple[dict[int, Numbers], dict[int, Floats]]:
        """All record numbers, and all vectors, by length."""
        return dict(self._numbers), dict(self._vectors)

    def put(self, tokens: int, numbers: Numbers, vectors: Floats) -> None:
        """All sentences of `tokens` tokens: their record numbers [n] and vectors [n, dimensions]."""
        self._numbers[tokens] = numbers
        self._vectors[tokens] = np.ascontiguousarray(vectors, np.float32)
        self._squares[tokens] = np.einsum("nd,nd->n", vectors, vectors).astype(np.float32)
        if len(numbers) >= self._from:
            self._put_graph(tokens)

    def search(self, tokens: int, queries: Floats, count: int = 1) -> tuple[Floats, Numbers]:
        """The `count` nearest, fewer where there are not so many, to each of `queries` [m, dimensions]: Euclidean
        distances, ascending, and record numbers, both [m, count]."""
        vectors = self._vectors.get(tokens)
        count = 0 if vectors is None else min(count, len(vectors))
        if vectors is None or not count:
            return np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
        if tokens in self._graphs:
            _, found = self._graphs[tokens].search(np.ascontiguousarray(queries, np.float32), count)
        else:
            # |q - v|^2 less the part that is the same for all v. Exact enough to choose by; distances are computed anew below.
            score = self._squares[tokens] - 2 * (queries @ vectors.T)
            found = np.argpartition(score, count - 1, axis=1)[:, :count] if count < len(vectors) else _all(score)
        apart = np.linalg.norm(vectors[found] - queries[:, None], axis=2)
        # Where a graph finds fewer, the others are numbered -1.
        apart[found < 0] = np.inf
        order = np.argsort(apart, axis=1, kind="stable")
        found = np.take_along_axis(found, order, 1)
        return np.take_along_axis(apart, order, 1), self._numbers[tokens][found]

    def _put_graph(self, tokens: int) -> None:
        vectors = self._vectors[tokens]
        try:
            faiss = import_module("faiss")
        except ImportError:
            self.notes.append(WITHOUT_FAISS.format(count=f"{len(vectors):,}", tokens=tokens))
            return
        path = None if self._folder is None else self._folder / f"hnsw-{tokens}.faiss"
        if path is not None and path.is_file():
            try:
                graph = faiss.read_index(str(path))
            except RuntimeError:
                graph = None  # damaged: built anew
            if graph is not None and graph.ntotal == len(vectors) and graph.d == vectors.shape[1]:
                last = np.empty(graph.d, np.float32)
                graph.reconstruct(len(vectors) - 1, last)
                if np.array_equal(last, vectors[-1]):
                    graph.hnsw.efSearch = SEARCH_EFFORT
                    self._graphs[tokens] = graph
                    return
        graph = faiss.IndexHNSWFlat(vectors.shape[1], LINKS)
        graph.hnsw.efConstruction, graph.hnsw.efSearch = BUILD_EFFORT, SEARCH_EFFORT
        graph.add(vectors)
        self._graphs[tokens] = graph
        if path is not None and path.parent.is_dir():
            faiss.write_index(graph, str(path))


def _all(score: NDArray[Any]) -> Numbers:
    return np.broadcast_to(np.arange(score.shape[1]), score.shape)


def weights_of(distances: Floats, power: float) -> Floats:
    """How much each of several neighbours [m, k] counts: by the inverse distance to the `power`; rows sum to 1. A
    neighbour at distance 0 counts alone."""
    nearest = np.maximum(distances[:, :1], 1e-6)
    weights = (nearest / np.maximum(distances, 1e-6)) ** power
    return np.asarray(weights / weights.sum(1, keepdims=True), np.float32)
