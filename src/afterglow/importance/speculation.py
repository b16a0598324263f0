"""Guess which chunks the next layer will want, while this one computes (SPEC, IV-C).

A guess is a ranking of rows, cut to the chunks that the disk can read in that time. It decides only which chunks are read
early: a layer attends to the rows that it selects itself, so a wrong guess costs bytes, never an answer.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from afterglow.errors import ConfigError
from afterglow.importance.select import Selection

Prior = Literal["prior", "cut", "random", "sinks", "none"]
C = TypeVar("C", bound=Hashable)

EXPLORED = 8  # of so many layers one, on average, goes the other way, with guesses or without
REMEMBERED = 15  # layers of each way
SINKS = 4  # first rows of a prefix, which most heads attend to
CUT = 0.5  # the share of a ranking that `cut` keeps


def ranking(before: Selection | None, mean: Tensor | None, k: int) -> Tensor:
    """Rank at most k rows that a layer is likely to select, the likeliest first: int64.

    `before`: the selection of the layer before, whose ranking is taken; None for the first layer. That one's ranking is by the
    rows' average importance in it, `mean` float32 [rows], without rows that were never important; without `mean` it is empty.
    """
    if before is not None:
        return before.ranked[:k]
    if mean is None:
        return torch.empty(0, dtype=torch.int64)
    order = mean.sort(descending=True, stable=True).indices[:k]
    return order[mean[order] > 0]


def guess(
    prior: Prior,
    before: Selection | None,
    mean: Tensor | None,
    count: int,
    k: int,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """List rows of a prefix of `count` rows in the order in which to prefetch them, int64 [k at most].

    `prior`: `ranking`; `cut`: the better half of that ranking; to compare with, `random` rows, and `sinks`: the prefix's first rows and
    its last ones.
    Raises: ConfigError, for another prior.
    """
    if prior == "prior" or prior == "cut":
        found = ranking(before, mean, k)
        return found if prior == "prior" else found[: max(1, round(CUT * len(found)))]
    if prior == "random":
        return torch.randperm(count, generator=generator)[:k]
    if prior == "sinks":
        return sinks(count, k)
    if prior == "none":
        return torch.empty(0, dtype=torch.int64)
    raise ConfigError(f"prior must be prior, cut, random, sinks or none, got {prior!r}")


def sinks(count: int, k: int) -> Tensor:
    """List k rows of `count`, int64: the first four, then the last ones, backwards."""
    first = min(SINKS, k, count)
    return torch.cat((torch.arange(first), torch.arange(count - 1, max(first, count - k + first) - 1, -1)))


def within(chunks: Iterable[int], missing: Callable[[int], Sequence[C]], most: int) -> list[C]:
    """List the chunks to read, given candidates by number, the likeliest first.

    `missing` lists the reads for a candidate. The first candidate that would make more than `most` ends the list:
    those after it are less likely.
    """
    found: list[C] = []
    for number in chunks:
        more = missing(number)
        if len(found) + len(more) > most:
            break
        found += more
    return found


@dataclass(slots=True)
class ReadBudget:
    """Estimate how much can be read while one layer computes: a moving average of layers' seconds, times the disk's rate."""

    beta: float = 0.2  # weight of the last measurement
    seconds: float | None = None

    def measured(self, seconds: float) -> None:
        """Add the seconds that a layer has computed."""
        self.seconds = seconds if self.seconds is None else self.seconds + self.beta * (seconds - self.seconds)

    def bytes(self, bandwidth: float) -> int:
        """Compute the bytes at `bandwidth` (bytes/s); 0 before a layer was measured."""
        return int((self.seconds or 0.0) * bandwidth)


class Worth:
    """Find out whether guessing pays: seconds of layers whose chunks were guessed, against those of layers whose were not, per row of
    their prefixes. Guesses cost time of the thread that computes, and of the processor that reads; where the disk is quick that may be
    more than the waiting that they save."""

    def __init__(self) -> None:
        self._seconds: dict[bool, deque[float]] = {way: deque(maxlen=REMEMBERED) for way in (False, True)}
        self._draw = random.Random(0)  # every eighth would be the same layers in each request

    @property
    def pays(self) -> bool:
        """Tell whether layers take less time with guesses, by the medians of the last ones; true before both ways are known."""
        without, guessed = self._seconds[False], self._seconds[True]
        return not without or not guessed or median(guessed) <= median(without)

    def next(self) -> bool:
        """Decide for a layer. One of EXPLORED goes the other way, since rates change."""
        return self.pays != (self._draw.randrange(EXPLORED) == 0)

    def took(self, guessed: bool, seconds: float) -> None:
        """Learn the seconds, per row of its prefix, of a layer whose chunks were `guessed` or not."""
        self._seconds[guessed].append(seconds)


@dataclass(slots=True)
class SpeculationTally:
    """Count bytes that were guessed, over layers and requests, by their fate.

    Once all guesses are settled, predicted = prefetched + cancelled, and prefetched = used + wasted.
    """

    predicted: int = 0  # asked for early
    cancelled: int = 0  # not wanted, and taken back before they were read
    hit: int = 0  # wanted, and there in time
    late: int = 0  # wanted, and still being read
    wasted: int = 0  # read, and not wanted
    missing: int = 0  # wanted, and not guessed

    @property
    def prefetched(self) -> int:
        """Count the bytes that were read early."""
        return self.predicted - self.cancelled

    @property
    def used(self) -> int:
        """Count the bytes that were read early and wanted."""
        return self.hit + self.late

    @property
    def recall(self) -> float:
        """Compute the share of wanted bytes that was guessed; 1 where no byte was wanted."""
        wanted = self.used + self.missing
        return self.used / wanted if wanted else 1.0

    @property
    def precision(self) -> float:
        """Compute the share of bytes read early that was wanted; 1 where no byte was read early."""
        return self.used / self.prefetched if self.prefetched else 1.0

    def check(self) -> None:
        """Assert that every byte of settled guesses is counted exactly once."""
        assert self.wasted + self.used == self.prefetched


@dataclass(slots=True)
class Speculation(Generic[C]):
    """Follow the guesses for one layer of one request, until the layer has selected.

    Chunks are anything hashable. A chunk that was guessed cannot be guessed again.
    """

    tally: SpeculationTally
    _bytes: dict[C, int] = field(default_factory=dict)
    _landed: set[C] = field(default_factory=set)

    def submit(self, chunk: C, size: int) -> None:
        """Note that a chunk of `size` bytes is going to be read."""
        assert chunk not in self._bytes, chunk
        self._bytes[chunk] = size
        self.tally.predicted += size

    def pending(self) -> list[C]:
        """List the chunks that are not known to have been read."""
        return [chunk for chunk in self._bytes if chunk not in self._landed]

    def landed(self, chunk: C) -> None:
        """Note that a chunk has been read."""
        assert chunk in self._bytes, chunk
        self._landed.add(chunk)

    def settle(self, wanted: Iterable[tuple[C, int]], cancelled: Iterable[C] = ()) -> list[C]:
        """Count the guesses against the chunks that the layer wants, each given once, with its bytes. `cancelled`: guesses that it does
        not want and that have been taken back.

        Returns the wanted chunks that were not guessed, to be read now.
        """
        missing: list[C] = []
        for chunk in cancelled:
            self.tally.cancelled += self._bytes.pop(chunk)
        for chunk, size in wanted:
            guessed = self._bytes.pop(chunk, None)
            if guessed is None:
                missing.append(chunk)
                self.tally.missing += size
            elif chunk in self._landed:
                self.tally.hit += guessed
            else:
                self.tally.late += guessed
        self.tally.wasted += sum(self._bytes.values())
        self._bytes.clear()
        self._landed.clear()
        return missing
