"""What the next layer is likely to want, guessed while this one computes (SPEC, IV-C; spec S11).

A guess is a ranking of rows, cut to what the disk can read meanwhile, in chunks. It decides what is read early and
nothing else: what a layer attends to is what it selects itself, so a wrong guess costs bytes, never an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from afterglow.errors import ConfigError
from afterglow.importance.identify import Selection

Prior = Literal["prior", "cut", "random", "sinks", "none"]
C = TypeVar("C", bound=Hashable)

SINKS = 4  # first rows of a prefix that are attended to whatever they say
CUT = 0.5  # of a ranking, what `cut` believes


def ranking(before: Selection | None, mean: Tensor | None, k: int) -> Tensor:
    """At most k rows that a layer is likely to select, the likeliest first: int64.

    `before`: what the layer before selected (with one set for all heads its ranking; with a set for each head rows by
    votes, then mean importance). None for the first layer: then the rows' average importance in it, `mean` float32
    [rows], of which rows that were never important are left out; without that, nothing.
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
    """Rows of a prefix of `count` rows in the order in which to prefetch them, int64 [k at most].

    `prior`: `ranking`; `cut`: its better half; to compare with, `random` rows, and `sinks`: the prefix's first rows and
    its last ones. Errors: ConfigError for another prior.
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
    """k rows of `count`: the first four, then the last ones, backwards. int64."""
    first = min(SINKS, k, count)
    return torch.cat((torch.arange(first), torch.arange(count - 1, max(first, count - k + first) - 1, -1)))


def within(chunks: Iterable[int], missing: Callable[[int], Sequence[C]], most: int) -> list[C]:
    """What has to be read of chunks, given by their numbers, the likeliest first: `missing` of each, as long as that is no more
    than `most` in all. A chunk that does not fit ends the list: what comes after it is less likely."""
    found: list[C] = []
    for number in chunks:
        more = missing(number)
        if len(found) + len(more) > most:
            break
        found += more
    return found


@dataclass(slots=True)
class Budget:
    """How much can be read while one layer computes: a moving average of layers' seconds, times the disk's rate."""

    beta: float = 0.2  # weight of what was measured last
    seconds: float | None = None

    def measured(self, seconds: float) -> None:
        """A layer has computed for so long."""
        self.seconds = seconds if self.seconds is None else self.seconds + self.beta * (seconds - self.seconds)

    def bytes(self, bandwidth: float) -> int:
        """Bytes at `bandwidth` (bytes/s); none before a layer was measured."""
        return int((self.seconds or 0.0) * bandwidth)


@dataclass(slots=True)
class Tally:
    """Bytes that were guessed, and what became of them. All are sums over layers and requests.

    `predicted`: submitted for reading. `cancelled`: taken back before they were read. `hit`: wanted, and there in time;
    `late`: wanted, and still being read. `wasted`: read, not wanted. `missing`: wanted, not (or no longer) guessed.
    predicted - cancelled = prefetched = used + wasted, once all is settled.
    """

    predicted: int = 0
    cancelled: int = 0
    hit: int = 0
    late: int = 0
    wasted: int = 0
    missing: int = 0

    @property
    def prefetched(self) -> int:
        """Bytes that were read early."""
        return self.predicted - self.cancelled

    @property
    def used(self) -> int:
        """Bytes that were read early and wanted."""
        return self.hit + self.late

    @property
    def recall(self) -> float:
        """Of what was wanted, what had been guessed; 1 where nothing was."""
        wanted = self.used + self.missing
        return self.used / wanted if wanted else 1.0

    @property
    def precision(self) -> float:
        """Of what was read early, what was wanted; 1 where nothing was."""
        return self.used / self.prefetched if self.prefetched else 1.0

    def check(self) -> None:
        """Nothing is counted twice, nothing left out (of settled guesses)."""
        assert self.wasted + self.used == self.prefetched


@dataclass(slots=True)
class Speculation(Generic[C]):
    """Guesses of one layer of one request, from their submission until the layer knows what it wants.

    Chunks are anything hashable, with their bytes. One that was guessed cannot be guessed again.
    """

    tally: Tally
    _bytes: dict[C, int] = field(default_factory=dict)
    _landed: set[C] = field(default_factory=set)

    def submit(self, chunk: C, size: int) -> None:
        """It is going to be read."""
        assert chunk not in self._bytes, chunk
        self._bytes[chunk] = size
        self.tally.predicted += size

    def cancel(self, chunk: C) -> None:
        """It is not going to be read after all (a demand read went first)."""
        assert chunk not in self._landed, chunk
        self.tally.cancelled += self._bytes.pop(chunk)

    def pending(self) -> list[C]:
        """Those that have not been read, as far as is known."""
        return [chunk for chunk in self._bytes if chunk not in self._landed]

    def landed(self, chunk: C) -> None:
        """It has been read."""
        assert chunk in self._bytes, chunk
        self._landed.add(chunk)

    def settle(self, wanted: Iterable[tuple[C, int]]) -> list[C]:
        """What the layer wants, each chunk once, with its bytes; returns those that nobody has guessed, to be read now."""
        missing: list[C] = []
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
