"""What loading and computing take, learned from what they took. Seconds, bytes and rows; no clock, no job.

Small models are fitted while running: seconds of a read to its bytes, from disk and from the shared tier apart, and seconds of a
forward pass to its rows, its attention and the rows it gathers. Until they have seen enough nothing is predicted, and cached rows are
loaded.

Tiers change their speed: others use the disk too, and host memory may have been swapped out. Old measurements count less than
new ones, and a tier that is too slow to be asked for anything is asked for a little now and then, or it could never be known
when it is fast again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

READS, PASSES = 0.85, 0.95  # weight of a sample after each later one
MIN_SAMPLES = 3
HALF_LIFE_S = 300.0  # after which old measurements of reads count half as much as new ones
MIN_AGED_WEIGHT = 0.01  # what it counts in any case
SURPRISE_FACTOR = 2.0  # times as slow as predicted is a tier that has changed, and not chance
PROBE_PART = 0.25  # of what computing its rows takes a probe may take: by then it is seen which is faster
PROBE_SHARE = 0.02  # of the time may be spent on probes: no job waits for them, but they take the disk from writes
MIN_GATHERED = 64  # rows; of fewer nothing is learned: what a pass takes by chance would count for each of so few
MILLION = 1e6  # attention products are counted in millions, so that the numbers of a fit are of one size


class Fit:
    """Non-negative linear regression that forgets: seconds ~ sum of weights times features, by relative error."""

    def __init__(self, features: int, forget: float) -> None:
        self.samples = 0
        self._n = features
        self._forget = forget
        self._a = [[0.0] * features for _ in range(features)]
        self._b = [0.0] * features
        self._weights: list[float] | None = None

    def add(self, features: Sequence[float], seconds: float, past: float = 1.0) -> None:
        """Add a sample; older samples count `past` times as much as they would. Samples of no duration say nothing."""
        if seconds <= 0:
            return
        forget = self._forget * past
        scaled = [x / seconds for x in features]  # relative errors count: a short step is as good as a long one
        for i, x in enumerate(scaled):
            self._b[i] = forget * self._b[i] + x
            for j, y in enumerate(scaled):
                self._a[i][j] = forget * self._a[i][j] + x * y
        self.samples += 1
        self._weights = None

    def predict(self, features: Sequence[float]) -> float | None:
        """Seconds; None before there are enough samples."""
        if self.samples < MIN_SAMPLES:
            return None
        if self._weights is None:
            self._weights = self._solve()
        return sum(weight * x for weight, x in zip(self._weights, features, strict=True))

    def _solve(self) -> list[float]:
        kept = list(range(self._n))
        while kept:
            found = _gauss(self._a, self._b, kept)
            worst = min(range(len(kept)), key=lambda i: found[i])
            if found[worst] >= 0:
                weights = [0.0] * self._n
                for i, weight in zip(kept, found, strict=True):
                    weights[i] = weight
                return weights
            del kept[worst]  # nothing takes less than no time
        return [0.0] * self._n


def _gauss(a: list[list[float]], b: list[float], kept: list[int]) -> list[float]:
    """Solve for the kept features. A little ridge decides between features that always go together: rather each
    row or byte takes longer than every call (feature 0)."""
    n = len(kept)
    m = [[a[i][j] * (1 + (1e-6 if i else 1e-4) * (i == j)) + 1e-18 * (i == j) for j in kept] + [b[i]] for i in kept]
    for column in range(n):
        pivot = max(range(column, n), key=lambda row: abs(m[row][column]))
        m[column], m[pivot] = m[pivot], m[column]
        if m[column][column] == 0:
            continue
        for row in range(n):
            if row != column:
                factor = m[row][column] / m[column][column]
                m[row] = [x - factor * y for x, y in zip(m[row], m[column], strict=True)]
    return [m[i][n] / m[i][i] if m[i][i] else 0.0 for i in range(n)]


def _surprised(expected: float, seconds: float) -> float:
    """Return what earlier samples count beside one that took so long: where it shows that the tier has changed, it is to count as
    much as each fast one."""
    return (expected / seconds) ** 2 if 0 < SURPRISE_FACTOR * expected < seconds else 1.0


@dataclass(slots=True)
class Work:
    """What a forward pass does: `rows` computed, `attended` products of rows and context, `gathered` rows."""

    rows: int = 0
    attended: float = 0.0
    gathered: int = 0

    def add(self, rows: int, start: int, gathered: int = 0) -> None:
        """One job's share: `rows` rows from row `start` on, after gathering `gathered`."""
        self.rows += rows
        self.attended += rows * (start + rows / 2)
        self.gathered += gathered

    def features(self) -> tuple[float, ...]:
        gathered = self.gathered if self.gathered >= MIN_GATHERED else 0
        return (1.0, self.rows, self.attended / MILLION, gathered)


class Cost:
    """Predictions for one engine."""

    def __init__(self, layers: int, readers: int = 1, probe_part: float = 0.0) -> None:
        """`probe_part`: see `SchedulerOptions`."""
        self.layers = layers
        self._probe_part = probe_part
        self._read_at = 0.0  # when a read was last measured
        self._fetch_at = 0.0
        self._probe_at = 0.0  # no probe before: the last ones have had their share
        self._busy = 0.0  # seconds of steps with a prefill in them, with what they waited for
        self._gathered_at = 0.0  # of these, when a pass was last measured that gathered rows
        self._selected_at = math.inf  # of these, when a job last began to select; before, that is predicted at its best
        self._read = Fit(2, READS)
        self._fetch = Fit(2, READS)  # reads of the shared tier, up to their last row in host
        self._pass = Fit(4, PASSES)
        self._select = Fit(3, PASSES)  # passes of jobs that select from their prefix
        self._chunks = 1.0  # what these read, as a multiple of the rows that they select
        self._unhidden = 1.0  # what they wait for that, as a multiple of what a load of as many bytes takes
        self._free = [0.0] * readers  # when each reader is going to have read all that it was asked for
        self._far_free = [0.0]  # the same for the shared tier, to which there is one line
        self._times: dict[int, tuple[float, float]] = {}  # when first and last layers of loads under way will be there
        self._held: dict[int, float] = {}  # loads that stop before their last layers, and the seconds of those
        self._far: set[int] = set()  # loads under way that come from the shared tier

    # ------------------------------------------------------------------------------------------- learning

    def started(self, move: int, size: int, now: float, far: bool = False, ahead: int | None = None) -> None:
        """Take note that a load was requested. `far`: from the shared tier. `ahead`: layers that come before `resumed`."""
        if far:
            self._far.add(move)
        free = self._far_free if far else self._free
        seconds, layers = self.read(size, far), self.layers
        if ahead is not None and ahead < layers:
            self._held[move] = seconds * (layers - ahead) / layers
            seconds, layers = seconds - self._held[move], max(1, ahead)
        self._times[move] = self._line_up(free, seconds, now, far, layers)

    def resumed(self, move: int, now: float) -> None:
        """Take note that a load that was to stop before its last layers goes on."""
        rest = self._held.pop(move, None)
        if rest is not None:
            far = move in self._far
            first, held = self._times[move]
            _, last = self._line_up(self._far_free if far else self._free, rest, max(now, held), far)
            self._times[move] = first, last

    def _line_up(
        self, free: list[float], seconds: float, now: float, far: bool = False, layers: int | None = None
    ) -> tuple[float, float]:
        """Predict when the first and the last layer of a load (of all `layers` by default) will be there: loads follow one
        another on whichever reader is free first."""
        reader = free.index(min(free))
        began = max(now, free[reader])
        free[reader] = began + seconds
        latency = min(self.read(0, far), seconds)
        return began + latency + (seconds - latency) / (layers or self.layers), free[reader]

    def ended(self, move: int, size: int, seconds: float, now: float) -> None:
        """Take note that a load has ended after reading `size` bytes in `seconds` (0 bytes: it failed)."""
        self._times.pop(move, None)
        self._held.pop(move, None)
        far = move in self._far
        self._far.discard(move)
        if not self._times:
            self._free = [now] * len(self._free)
            self._far_free = [now]
        if size and far:
            self._fetch.add((1.0, size), seconds, self._past(size, seconds, now, far))
            self._fetch_at = now
        elif size:
            self._read.add((1.0, size), seconds, self._past(size, seconds, now))
            self._read_at = now

    def _past(self, size: int, seconds: float, now: float, far: bool = False) -> float:
        """What earlier reads count beside this one, by their age. Errors are relative, so that a slow read counts next
        to nothing beside fast ones."""
        last = self._fetch_at if far else self._read_at
        aged = max(MIN_AGED_WEIGHT, math.exp2(min(0.0, last - now) / HALF_LIFE_S))
        return aged * _surprised(self.read(size, far), seconds)

    # ----------------------------------------------------------------------------------------------- probing

    def probe(self, rows: int, start: int, now: float) -> float | None:
        """Return how long a probe may take: a read of rows that are recomputed, to see whether the tier has become faster.
        None: not now. Probes take their share of the time since the last read, after the debt of longer probes."""
        most = PROBE_PART * self.compute(rows, start)
        if not most or self._times or now < max(self._probe_at, self._read_at + most / PROBE_SHARE):
            return None
        return most

    def probed(self, seconds: float, now: float) -> None:
        """Take note that a probe has ended after so many seconds."""
        self._probe_at = now + seconds / PROBE_SHARE

    def passed(self, work: Work, seconds: float) -> None:
        """Learn from a forward pass that waited for nothing."""
        features, past = work.features(), 1.0
        if work.gathered >= MIN_GATHERED:
            past, self._gathered_at = _surprised(self._pass.predict(features) or 0.0, seconds), self._busy
        self._pass.add(features, seconds, past)

    def worked(self, seconds: float) -> None:
        """Take note of a step with a prefill in it, whatever it waited for. Jobs wait for what is tried, so that it may take a share of
        these seconds, and none of idle time."""
        self._busy += seconds

    def may_gather(self, rows: int, start: int) -> bool:
        """May rows in host be gathered that are faster to compute, to see whether host has become faster? What that takes longer is
        the probes' share of what prefills have taken since rows were gathered last."""
        longer = self.gather(rows) - self.compute(rows, start)
        return longer <= PROBE_SHARE * (self._busy - self._gathered_at)

    def may_select(self, longer: float) -> bool:
        """May a pass select that is predicted to take `longer` seconds longer so, to see whether that is still right? That is the
        probes' share of what prefills have taken since a job last began to select."""
        return longer <= PROBE_SHARE * (self._busy - self._selected_at)

    def selects(self) -> None:
        """Take note that a job begins to select. What comes of it, jobs behind it are not to try as well."""
        self._selected_at = self._busy

    def selected(self, rows: int, prefix: int, seconds: float) -> None:
        """Learn from a pass that selected from `prefix` rows for `rows` new ones; without what it waited for."""
        self._select.add((1.0, rows, prefix), seconds)

    def read_selected(self, retention: float, sizes: Sequence[int], read: int, waited: float) -> None:
        """Learn how much of the files of these sizes a pass has read that selected the share `retention` of the rows, in bytes, and how
        long it has waited for that: rows come in chunks, caches have some, and layers compute while others are read."""
        part = read / sum(sizes)
        self._chunks += (part / self._selected_rows(retention) - self._chunks) / 4
        if expected := self.alone([int(part * size) for size in sizes]):
            self._unhidden += (waited / expected - self._unhidden) / 4

    # ----------------------------------------------------------------------------------------- predicting

    @property
    def lessons(self) -> int:
        """How many passes it has learned from."""
        return self._pass.samples

    @property
    def known(self) -> bool:
        """Can loading be compared with computing?"""
        return self._read.samples >= MIN_SAMPLES and self._pass.samples >= MIN_SAMPLES

    @property
    def far_known(self) -> bool:
        """Can fetching from the shared tier be compared with computing?"""
        return self._fetch.samples >= MIN_SAMPLES and self._pass.samples >= MIN_SAMPLES

    @property
    def fetch_rate(self) -> float | None:
        """Bytes/s of a fetch of a megabyte from the shared tier."""
        seconds = self._fetch.predict((1.0, MILLION))
        return MILLION / seconds if seconds else None

    @property
    def read_rate(self) -> float | None:
        """Bytes/s of a read of a megabyte."""
        seconds = self._read.predict((1.0, MILLION))
        return MILLION / seconds if seconds else None

    @property
    def prefill_rate(self) -> float | None:
        """Rows/s of a prefill of 512 rows."""
        seconds = self.compute(512, 0)
        return 512 / seconds if seconds else None

    def compute(self, rows: int, start: int, gathered: int = 0) -> float:
        """Seconds to compute `rows` rows from row `start` on. 0 before anything is known."""
        work = Work()
        work.add(rows, start, gathered)
        return self._pass.predict(work.features()) or 0.0

    def select(self, rows: int, prefix: int) -> float:
        """Seconds of a pass that selects from `prefix` rows for `rows` new ones, without what it waits for. At least as long as one
        without a prefix."""
        return max(self._select.predict((1.0, rows, prefix)) or 0.0, self.compute(rows, 0))

    def select_from(self, rows: int, prefix: int, retention: float, sizes: Sequence[int], now: float) -> float:
        """Seconds of a pass for `rows` new rows that reads the share `retention` of `prefix` rows from files of these sizes."""
        part = self.selected_part(retention)
        reading = self.loads([int(part * size) for size in sizes], now)
        return max(reading, self.select(rows, prefix) + self._unhidden * reading)

    def selected_part(self, retention: float) -> float:
        """Return the part of the bytes on disk that a pass reads which selects the share `retention` of the rows."""
        return min(1.0, self._chunks * self._selected_rows(retention))

    def _selected_rows(self, retention: float) -> float:
        """Return the part that these rows alone are, with what is read in any case."""
        return retention + (1 - retention) * self._probe_part

    def gather(self, rows: int) -> float:
        """Seconds that a forward pass takes longer for gathering `rows` rows."""
        return (self._pass.predict((0.0, 0.0, 0.0, rows)) or 0.0) if rows else 0.0

    def read(self, size: int, far: bool = False) -> float:
        """Seconds of a load of `size` bytes, `far` from the shared tier. 0 before anything is known."""
        return (self._fetch if far else self._read).predict((1.0, size)) or 0.0

    def coming(
        self, moves: Sequence[int], reads: Sequence[float], now: float, far: Sequence[float] = ()
    ) -> tuple[float, float]:
        """Seconds until the first, and the last, layers are there of these loads under way, and of further ones that
        are requested now and take so long each, `far` ones from the shared tier. An overdue load is taken to need as long
        again; one that stops before its last layers goes on now."""
        first = last = 0.0
        for move in moves:
            if (times := self._times.get(move)) is not None and (rest := self._held.get(move)) is not None:
                first, last = max(first, times[0] - now), max(last, max(0.0, times[1] - now) + rest)
            elif times is not None:
                late = max(0.0, now - times[1])
                first, last = max(first, times[0] - now, late), max(last, times[1] - now, late)
        free = list(self._free) if reads else []
        for seconds in reads:
            times = self._line_up(free, seconds, now)
            first, last = max(first, times[0] - now), max(last, times[1] - now)
        free = list(self._far_free) if far else []
        for seconds in far:
            times = self._line_up(free, seconds, now, far=True)
            first, last = max(first, times[0] - now), max(last, times[1] - now)
        return first, last

    def alone(self, sizes: Sequence[int], far: Sequence[int] = ()) -> float:
        """Seconds that loads of these sizes, `far` ones from the shared tier, take when nothing else is read."""
        free, away = [0.0] * len(self._free), [0.0]
        for size in sizes:
            self._line_up(free, self.read(size), 0.0)
        for size in far:
            self._line_up(away, self.read(size, True), 0.0, far=True)
        return max(*free, *away)

    def is_held(self, move: int) -> bool:
        """Does a load stop before its last layers, until `resumed`?"""
        return move in self._held

    def held_at(self, moves: Sequence[int]) -> float:
        """Return when those of these loads that stop before their last layers will have come so far."""
        return max((self._times[move][1] for move in moves if move in self._held), default=-math.inf)

    def loads(self, sizes: Sequence[int], now: float, far: Sequence[int] = ()) -> float:
        """Seconds until loads of these sizes, `far` ones from the shared tier, asked for now, have ended."""
        fetches = [self.read(size, True) for size in far]
        return self.coming((), [self.read(size) for size in sizes], now, fetches)[1]

    def fits_at(self, moves: Sequence[int], computing: float, now: float) -> float:
        """Return when `fits` may say yes to these loads under way, if it does not now; at the latest when a load is overdue,
        because then more has to be looked at. `now`: one is."""
        latest, due = now, math.inf
        for move in moves:
            if (times := self._times.get(move)) is not None:
                lead = computing / self.layers
                latest = max(latest, times[0] - lead, times[1] - computing + lead)
                due = min(due, times[1])
        return max(now, min(latest, due)) if self.known else now

    def fits(self, first: float, last: float, computing: float) -> bool:
        """May a pass of `computing` seconds begin although the first, and the last, layers of what it gathers are not
        there for so many seconds?

        The first layer is waited for no longer than computing one takes, and the last layer's rows must be there when
        its turn comes (CachedAttention §3.2.1; the exact read buffer, in time instead of layers:
        n t_load - (n - 1) t_compute <= lead).
        """
        return first <= computing / self.layers and last <= computing * (self.layers - 1) / self.layers
