"""Paired comparisons: the same tokens and questions in every variant, errors clustered by session."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def mean_and_error(clusters: Sequence[Tensor]) -> tuple[float, float]:
    """Mean over all values, and its standard error where values of one cluster (a session) hang together."""
    values = torch.cat([cluster.double() for cluster in clusters])
    mean, groups = values.mean(), len(clusters)
    if groups < 2:
        return float(mean), math.nan
    sums = torch.stack([(cluster.double() - mean).sum() for cluster in clusters])
    return float(mean), float(sums.square().sum().mul(groups / (groups - 1)).sqrt()) / len(values)


class Paired:
    """Values of every variant on the same samples, by cluster: samples of one session are not independent."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, dict[str, Tensor]]] = []

    def add(self, values: dict[str, Tensor], cluster: int) -> None:
        """Equally many values of each variant, in the same order. Nothing, or none of each, adds nothing."""
        if values and len(next(iter(values.values()))):
            self._parts.append((cluster, values))

    def extend(self, other: Paired) -> None:
        """Take all values of another one; its cluster numbers mean the same."""
        self._parts += other._parts

    def clusters(self) -> list[dict[str, Tensor]]:
        """One dict for each cluster: all its values, by variant."""
        found: dict[int, list[dict[str, Tensor]]] = {}
        for cluster, values in self._parts:
            found.setdefault(cluster, []).append(values)
        return [{name: torch.cat([part[name] for part in parts]) for name in parts[0]} for parts in found.values()]

    def perplexity(self, against: str = "TT") -> dict[str, Any]:
        """Of values that are losses: perplexities, and each variant's over that of `against` with its error."""
        clusters = self.clusters()
        row = _counted("tokens", clusters) | {"perplexity": {}, "ratio": {}}
        for name in clusters[0] if clusters else ():
            mean, _ = mean_and_error([cluster[name] for cluster in clusters])
            row["perplexity"][name] = round(math.exp(mean), 4)
            if name != against:
                apart, error = mean_and_error([cluster[name] - cluster[against] for cluster in clusters])
                row["ratio"][name] = _pair(math.exp(apart), math.exp(apart) * error)
        return row

    def accuracy(self, against: str = "TT") -> dict[str, Any]:
        """Of values that are 0 or 1: their share in percent, and the difference to `against` in points."""
        clusters = self.clusters()
        row = _counted("questions", clusters) | {"accuracy": {}, "points": {}}
        for name in clusters[0] if clusters else ():
            row["accuracy"][name] = _pair(*_percent([cluster[name] for cluster in clusters]))
            if name != against:
                row["points"][name] = _pair(*_percent([cluster[name] - cluster[against] for cluster in clusters]))
        return row


def _counted(what: str, clusters: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    return {what: sum(len(next(iter(cluster.values()))) for cluster in clusters), "sessions": len(clusters)}


def _percent(clusters: Sequence[Tensor]) -> tuple[float, float]:
    mean, error = mean_and_error(clusters)
    return 100 * mean, 100 * error


def _pair(value: float, error: float) -> dict[str, float | None]:
    return {"value": round(value, 4), "error": None if math.isnan(error) else round(error, 4)}
