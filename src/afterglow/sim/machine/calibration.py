"""From a journal to a calibration: what passes and transfers took on the machine where it was written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from afterglow.errors import ConfigError
from afterglow.plan.journal.replaying import replay
from afterglow.plan.step import Load, Step, Store
from afterglow.plan.tiers.cost import MILLION, Fit
from afterglow.sim.machine.timing import Calibrated, Calibration

LEAST = 20  # passes of either kind, below which a fit says nothing
PAUSE_S = 0.01  # a longer gap between two steps was no overhead: there was nothing to do


@dataclass(slots=True)
class JournalSamples:
    """What a journal tells: features and seconds of passes and transfers."""

    prefills: list[tuple[Sequence[float], float]] = field(default_factory=list)  # 1, rows, million products, gathered
    decodes: list[tuple[Sequence[float], float]] = field(default_factory=list)  # 1, jobs, thousand context rows
    reads: list[tuple[Sequence[float], float]] = field(default_factory=list)  # 1, bytes
    writes: list[tuple[Sequence[float], float]] = field(default_factory=list)


def calibrate(lines: Iterable[str], model: str, kv_bytes_per_token: int) -> Calibration:
    """Fit passes and transfers to what a journal says they took. Raises: ConfigError, where there are too few."""
    found = measure(lines)
    for name, samples in (("prefills", found.prefills), ("decode steps", found.decodes), ("reads", found.reads)):
        if len(samples) < LEAST:
            raise ConfigError(
                f"the journal has {len(samples)} {name} that waited for nothing; a calibration takes {LEAST}"
            )
    prefill, decode = _fitted(found.prefills, 4), _fitted(found.decodes, 3)
    latency, per_byte = _fitted(found.reads, 2)
    write = _fitted(found.writes, 2)[1] if len(found.writes) >= LEAST else per_byte
    timing = Calibrated((prefill[0], prefill[1], prefill[2], prefill[3]), (decode[0], decode[1], decode[2]))
    return Calibration(timing, _rate(per_byte), _rate(write), latency, model, kv_bytes_per_token)


def measure(lines: Iterable[str]) -> JournalSamples:
    """Durations of everything in a journal that waited for nothing else."""
    found = JournalSamples()
    clock = _Clock()
    before: Step | None = None
    moves: dict[int, Load | Store] = {}
    for step, _ in replay(clock.watch(lines)):
        if before is not None and before.runs:
            _pass(found, before, clock.committed - clock.began_before + clock.gap)
        for item in clock.take_done():
            move = moves.pop(item["move"], None)
            if move is not None and item["ok"] and item["bytes"] and item["seconds"] > 0:
                kind = found.reads if isinstance(move, Load) else found.writes
                kind.append(((1.0, item["bytes"]), item["seconds"]))
        moves.update({move.move: move for move in step.moves if isinstance(move, Load | Store)})
        before = step
    return found


class _Clock:
    """Reads the times of a journal's lines as they pass by."""

    def __init__(self) -> None:
        self.began = self.began_before = self.committed = self.gap = 0.0
        self._done: list[dict[str, Any]] = []

    def watch(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            entry = json.loads(line) if line.startswith('{"op":"sched') or '"done"' in line else {}
            if entry.get("op") == "schedule":
                self.began_before, self.began = self.began, entry["now"]
                gap = self.began - self.committed
                self.gap = gap if gap < PAUSE_S else 0.0
            elif entry.get("op") == "commit":
                self.committed = entry["now"]
            self._done += [item for item in entry.get("done", ()) if item["kind"] == "MoveDone"]
            yield line

    def take_done(self) -> list[dict[str, Any]]:
        done, self._done = self._done, []
        return done


def _pass(found: JournalSamples, step: Step, seconds: float) -> None:
    if any(gather.move is not None for run in step.runs for gather in run.gathers):
        return  # it may have waited
    rows = sum(len(run.tokens) for run in step.runs)
    gathered = sum(gather.stop - gather.start for run in step.runs for gather in run.gathers)
    if rows == len(step.runs) and not gathered:
        context = sum(run.start + 1 for run in step.runs)
        found.decodes.append(((1.0, len(step.runs), context / 1e3), seconds))
    else:
        attended = sum(len(run.tokens) * (run.start + len(run.tokens) / 2) for run in step.runs)
        found.prefills.append(((1.0, rows, attended / MILLION, gathered), seconds))


def _fitted(samples: Sequence[tuple[Sequence[float], float]], features: int) -> list[float]:
    """The weights of a non-negative fit by relative error, all samples counting the same."""
    fit = Fit(features, 1.0)
    for values, seconds in samples:
        fit.add(values, seconds)
    units = [[float(i == j) for j in range(features)] for i in range(features)]
    return [fit.predict(unit) or 0.0 for unit in units]


def _rate(per_byte: float) -> float:
    return 1 / per_byte if per_byte > 0 else 1e12  # so fast that only the latency was seen
