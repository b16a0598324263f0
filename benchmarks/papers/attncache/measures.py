"""Data, scores and times of the AttnCache benchmark."""

from __future__ import annotations

import copy
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from afterglow.errors import ConfigError
from afterglow.model.encoder import Model

TASKS = ("sts12", "sts13", "sts14", "sts15", "stsb")
Pair = tuple[float, str, str]
CLOCK = "processor time of one thread" if os.environ.get("OMP_NUM_THREADS") == "1" else "wall clock"


def now() -> float:
    """Seconds. With one thread it is the processor's time: that does not count when others have the core."""
    return time.thread_time() if CLOCK.startswith("processor") else time.perf_counter()


def read_pairs(folder: Path, task: str) -> list[Pair]:
    """Score and two sentences, of `sts/TASK.tsv` or `TASK.tsv`; of stsb the test part. Raises: ConfigError."""
    name = f"{'stsb_test' if task == 'stsb' else task}.tsv"
    for path in (folder / "sts" / name, folder / name):
        if path.is_file():
            return _rows(path)
    raise ConfigError(f"--tasks {task}: there is neither {folder / 'sts' / name} nor {folder / name}")


@dataclass(frozen=True, slots=True)
class Parts:
    """The three parts of a data set. Databases are made of `known`, settings are chosen on `validation`, and results
    are reported on `test`."""

    known: list[str]
    validation: list[Pair]
    test: list[Pair]


def split(folder: Path, task: str, build: int, pairs: int | None, seed: int) -> Parts:
    """`build` sentences to know, and at most `pairs` of the other pairs for each of the two other parts. stsb comes in three
    parts; other data sets are cut, and no pair is in two parts. Raises: ConfigError."""
    random = np.random.default_rng(seed)
    if task == "stsb":
        rows = _rows(folder / "sts" / "stsb_train.tsv")
        known, test = [rows[i] for i in random.permutation(len(rows))[: build // 2]], read_pairs(folder, task)
        validation = _rows(folder / "sts" / "stsb_dev.tsv")
        test = [test[i] for i in random.permutation(len(test))]
        validation = [validation[i] for i in random.permutation(len(validation))]
    else:
        rows = read_pairs(folder, task)
        order = random.permutation(len(rows))
        known, rest = [rows[i] for i in order[: build // 2]], [rows[i] for i in order[build // 2 :]]
        if len(rest) < 2:
            raise ConfigError(
                f"--tasks {task}: {len(rows)} pairs are too few for --build {build}; at least 2 must be left"
            )
        rest = [rest[i] for i in random.permutation(len(rest))]
        cut = min(pairs or len(rest), len(rest) // 2)
        test, validation = rest[:cut], rest[cut:]
    return Parts([text for pair in known for text in pair[1:]], validation[: pairs or None], test[: pairs or None])


def _rows(path: Path) -> list[Pair]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fields = line.split("\t")
        try:
            rows.append((float(fields[0]), fields[1], fields[2]))
        except (ValueError, IndexError):
            raise ConfigError(
                f"{path}, line {number}: score, sentence and sentence are wanted, parted by tabs; got {line[:60]!r}"
            ) from None
    return rows


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; ties share their mean rank. Not a number where all of one side are equal."""
    if min(len(set(first)), len(set(second))) < 2:
        return float("nan")
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + last - 1) / 2)[place]


def cosines(vectors: Tensor) -> NDArray[np.float64]:
    """Compute the cosines of neighbouring rows of unit `vectors` [2 x pairs, dimensions], [pairs]."""
    return (vectors[0::2] * vectors[1::2]).sum(1).double().numpy()


def gamma(full: float, method: float, speedup: float) -> float:
    """The speed-up degradation ratio (AttnCache, 4.4): what a unit of speed-up costs. Scores are fractions: with percents
    the paper's own numbers do not come out."""
    return (full - method) / (speedup - 1)


class Clock:
    """Seconds spent in what it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = now()
            try:
                return work(*args)
            finally:
                self.seconds += now() - began

        return timed


def timed_model(model: Model, clock: Clock) -> Model:
    """The same model, with the output projections on the clock: what a pass spends in attention is that and its `Attend`."""
    timed = copy.copy(model)
    timed.layers = tuple(dataclasses.replace(layer, out=clock.wrap(layer.out)) for layer in model.layers)  # type: ignore[arg-type]
    return timed
