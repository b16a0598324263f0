"""Carries out steps on a modelled machine: transfers take their turn on links, passes take what they are said to take.

Nothing is computed and nothing is moved; what comes back are times, and the tokens that the trace says were drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Literal

from afterglow.choices import Preload
from afterglow.plan.step import DEMAND, Copy, Drop, Load, MoveDone, Run, SaveDone, Step, StepResult, Store, TransferDone
from afterglow.sim.links import Link, Pipe
from afterglow.sim.machine.timing import Timing

Saving = Literal["async", "sync"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What surrounds the devices: bytes/s between the tiers. `row_bytes`: keys and values of one row, all layers.

    `read_buffer`: layers of the next job's rows that may come to the device while the step before computes
    (CachedAttention §3.2.1). `saving`: does a step wait until its rows are in host (the baseline of §3.2.2)?
    """

    row_bytes: int
    layers: int
    host_link: float
    disk_read: float
    disk_write: float
    disk_latency: float = 0.0
    host_copy: float = 20e9
    read_buffer: int = 0
    preload: Preload = "layerwise"
    saving: Saving = "async"


@dataclass(slots=True)
class _Decoding:
    """What a job is going to draw. `since`: when it came."""

    tokens: bytes
    since: float
    drawn: int = 0

    def draw(self, count: int) -> bytes:
        """The next so many tokens."""
        at = self.drawn
        self.drawn = at + count
        return self.tokens[4 * at : 4 * (at + count)]


class Executor:
    """One engine's devices, links and disk. `now` never goes back."""

    def __init__(self, machine: Machine, timing: Timing) -> None:
        self.machine = machine
        self.timing = timing
        self.disk_in = Link(machine.disk_read, machine.disk_latency)
        self.disk_out = Link(machine.disk_write, machine.disk_latency)
        self.host_in = Pipe(machine.host_link)  # device to host: saves
        self.host_out = Pipe(machine.host_link)  # host to device: gathers
        self.copies = Pipe(machine.host_copy)
        self.prefilling = 0.0  # seconds of passes with a prefill in them
        self.decoding = 0.0  # seconds of all other passes
        self.stalled = 0.0  # of `prefilling`: seconds in which nothing was computed
        self._replies: dict[int, _Decoding] = {}
        self._due: list[tuple[float, int, TransferDone]] = []  # a heap
        self._numbers = 0
        self._saved: dict[int, list[int]] = {}  # of decoding jobs, not told yet: draft, first row, rows in host
        self._sizes: dict[str, int] = {}  # of the files on disk
        self._given_up: dict[int, bool] = {}  # probes: are they going to be?
        self._began = 0.0  # when the last step began

    # ----------------------------------------------------------------------------------------------- jobs

    def expect(self, job: int, reply: bytes, since: float) -> None:
        """A job that came at that time will draw these tokens (uint32, little-endian)."""
        self._replies[job] = _Decoding(reply, since)

    def forget(self, job: int) -> None:
        """It has ended."""
        self._replies.pop(job, None)

    # ----------------------------------------------------------------------------------------- completions

    @property
    def next_event(self) -> float:
        """When something will have ended; infinity: nothing is under way."""
        return min(self._due[0][0] if self._due else inf, self.disk_in.next_end, self.disk_out.next_end)

    def take(self, now: float) -> list[TransferDone]:
        """All that has ended by now, in order."""
        for link in (self.disk_in, self.disk_out):
            for ended in link.take(now):
                slow = self._given_up.pop(ended.key, False)
                why = "slow" if slow else None
                self._tell(ended.at, MoveDone(ended.key, not slow, ended.size, ended.seconds, why=why))
        found: list[TransferDone] = []
        while self._due and self._due[0][0] <= now:
            found.append(heappop(self._due)[2])
        return found

    def _tell(self, when: float, done: TransferDone) -> None:
        self._numbers += 1
        heappush(self._due, (when, self._numbers, done))

    # ------------------------------------------------------------------------------------------------ steps

    def start(self, step: Step, now: float) -> None:
        """The moves of a step begin."""
        for release in step.releases:
            self._flush(release.job, None, now)
            for save in release.saves:
                there = self.host_in.carry(save.rows * self.machine.row_bytes, now)
                self._tell(there, SaveDone(save.draft, save.draft_row, save.rows))
        for move in step.moves:
            if isinstance(move, Load):
                self.disk_in.ask(move.move, self._probed(move, self._sizes[move.extent]), move.priority, now)
            elif isinstance(move, Store):
                self._sizes[move.record.id] = move.record.file_bytes
                self.disk_out.ask(move.move, move.record.file_bytes, move.priority, now)
            elif isinstance(move, Drop):
                del self._sizes[move.extent]
                self._tell(now, MoveDone(move.move, True))
            elif isinstance(move, Copy):
                self._tell(self.copies.carry(move.rows * self.machine.row_bytes, now), MoveDone(move.move, True))
        for number in step.urged:
            self.disk_in.urge(number, DEMAND)

    def _probed(self, load: Load, size: int) -> int:
        """Compute the bytes that a load reads: all bytes, or, for a probe that takes too long, the layers until that is noticed."""
        seconds = self.disk_in.seconds(size)
        if load.most_s is None or seconds <= load.most_s:
            return size
        layers = self.machine.layers
        least = min(int(layers * load.most_s / seconds) + 1, layers)
        self._given_up[load.move] = least < layers
        return size * least // layers

    def run(self, step: Step, now: float, until: float) -> tuple[float, StepResult]:
        """Compute a step, as often as is allowed before `until`. Returns when it has ended, and the tokens drawn."""
        runs = step.runs
        if step.repeat > 1:  # all its runs decode
            return self._decode(step, now, until)
        rows = context = gathered = 0
        for run in runs:
            count = len(run.tokens)
            rows += count
            context += run.start + count
            for gather in run.gathers:
                gathered += gather.stop - gather.start
        jobs = len(runs)
        if rows == jobs and not gathered:
            return self._decode(step, now, until)
        attended = sum(len(run.tokens) * (run.start + len(run.tokens) / 2) for run in runs)
        computing = self.timing.seconds(rows, attended, context, jobs, gathered)
        end = now + self._prefill(runs, now, computing, gathered)
        for run in runs:
            for save in run.saves:
                there = self.host_in.carry(save.rows * self.machine.row_bytes, now)
                self._flush(run.job, save.draft, end)
                self._tell(max(end, there), SaveDone(save.draft, save.draft_row, save.rows))
                if self.machine.saving == "sync":
                    end = max(end, there)
        self.prefilling += end - now
        self.stalled += end - now - computing
        self._began = now
        tokens = {run.job: int.from_bytes(self._replies[run.job].draw(1), "little") for run in runs if run.sample}
        return end, StepResult(tokens, {})

    def _decode(self, step: Step, now: float, until: float) -> tuple[float, StepResult]:
        """So many steps that the last one begins before `until`."""
        runs = step.runs
        times, total = self._repeats(step, now, until)
        saved, replies = self._saved, self._replies
        drawn = {}
        saving = 0
        for run in runs:
            job = run.job
            if run.saves:
                saving += 1
                save = run.saves[0]
                entry = saved.get(job)
                if entry is not None and entry[0] == save.draft:
                    entry[2] += times
                else:
                    self._flush(job, save.draft, now)
                    saved[job] = [save.draft, save.draft_row, times]
            if run.sample:
                drawn[job] = replies[job].draw(times)
        self.host_in.bytes += times * saving * self.machine.row_bytes
        self.decoding += total
        self._began = now
        return now + total, StepResult({}, {}, times, drawn)

    def decodes_until(self, step: Step, now: float, until: float) -> float:
        """When a step of nothing but decodes will have ended, if it is run; it is not."""
        return now + self._repeats(step, now, until)[1]

    def _repeats(self, step: Step, now: float, until: float) -> tuple[int, float]:
        """How often decodes are repeated, and the seconds that it takes."""
        jobs = len(step.runs)
        context = jobs + sum(run.start for run in step.runs)
        seconds = self.timing.seconds
        first = seconds(jobs, context - jobs / 2, context, jobs)
        times, total = 1, first
        if step.repeat > 1 and now + first < until:
            last = context + jobs * step.repeat
            slope = (seconds(jobs, last - jobs / 2, last, jobs) - first) / step.repeat
            while times < step.repeat and now + total < until:
                total += first + slope * times
                times += 1
        return times, total

    def _flush(self, job: int, draft: int | None, now: float) -> None:
        """Report the rows saved for a job's previous draft, when the job begins another draft or leaves."""
        entry = self._saved.get(job)
        if entry is not None and entry[0] != draft:
            del self._saved[job]
            self._tell(now, SaveDone(entry[0], entry[1], entry[2]))

    def _prefill(self, runs: Iterable[Run], now: float, computing: float, gathered: int) -> float:
        """Seconds of a pass whose layers wait for their rows: layer by layer, or until all are there."""
        machine = self.machine
        if not gathered or machine.host_link == inf:
            late = self._latest(runs)
            return computing + max(0.0, late - now)
        layers = machine.layers
        size = gathered * machine.row_bytes
        self.host_out.carry(size, now)
        loading, computed = size / machine.host_link / layers, computing / layers
        late = self._latest(runs)
        if machine.preload == "whole":
            return max(0.0, late - now) + layers * loading + computing
        # The buffer has been filled since the last step began, or since the job came.
        ahead = now - max(self._began, *(self._replies[run.job].since for run in runs if run.gathers))
        buffered = min(machine.read_buffer, int(ahead / loading)) if loading else layers
        disk = max(0.0, late - now) / layers  # between layers that come from disk
        # A layer computes when the one before has, and its rows are there: they come evenly, so that either the first
        # layer is waited for longest, or the last one.
        first, last = max((1 - buffered) * loading, disk), max((layers - buffered) * loading, layers * disk)
        return max(first + computing, last + computed)

    def _latest(self, runs: Iterable[Run]) -> float:
        """When the last load that these runs wait for has ended."""
        latest = 0.0
        for run in runs:
            for gather in run.gathers:
                if gather.move is not None:
                    latest = max(latest, self.disk_in.ends(gather.move) or 0.0)
        return latest
