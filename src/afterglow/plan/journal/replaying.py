"""Record the inputs of a scheduler, and replay them: the same inputs, so the same steps.

That is how a simulator is held to what an engine did, and how a bug seen once can be seen again. Lines come out one by one; this
file knows no file on disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from math import inf
from typing import Any

from afterglow.errors import RequestError
from afterglow.plan.batching.commit import expanded
from afterglow.plan.journal.inputs import INPUTS, Entry, Input, Schedule, Submit, unpacked
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import Step, StepResult


def replay(
    lines: Iterable[str], look: Callable[[Scheduler], object] = lambda scheduler: None
) -> Iterator[tuple[Step, str]]:
    """Yield the steps that a journal's inputs lead to, each with the digest of the step that was recorded (empty: it
    failed). After each input, `look` may look at the plan."""
    scheduler: Scheduler | None = None
    for number, line in enumerate(lines, 1):
        entry = _parsed(line, number)
        op = entry.pop("op")
        if op == "plan":
            scheduler = _start(entry)
            continue
        found = _input(op, entry).apply(_begun(scheduler))
        look(_begun(scheduler))
        if op == "schedule":
            yield found, entry["step"]


def replay_repeated(lines: Iterable[str], limit: int) -> Iterator[tuple[Step, str]]:
    """Replay a journal whose steps were carried out once each, with as many steps at once as possible, at most `limit`.
    Yields the steps one by one, as `expanded` makes them."""
    scheduler: Scheduler | None = None
    entries = [_parsed(line, number) for number, line in enumerate(lines, 1)]
    at = 0
    while at < len(entries):
        entry = dict(entries[at])
        op = entry.pop("op")
        at += 1
        if op == "plan":
            scheduler = _start(entry)
        elif op != "schedule":
            _input(op, entry).apply(_begun(scheduler))
        else:
            guesses = Schedule.of(entry).guesses
            step = _begun(scheduler).schedule(entry["now"], 1 if guesses else limit, guesses)
            times = _times(entries, at - 1, step)
            if times < 2:
                yield replace(step, repeat=1), entry["step"]
                continue
            commits = entries[at : at + 2 * times : 2]
            drawn = {run.job: b"" for run in step.runs}
            for commit in commits:
                for job, token in commit["tokens"]:
                    drawn[job] += token.to_bytes(4, "little")
                for job, text in commit.get("drawn", ()):
                    drawn[job] += bytes.fromhex(text)
            result = StepResult({}, {}, times, drawn)
            recorded = [each["step"] for each in entries[at - 1 : at - 1 + 2 * times : 2]]
            yield from zip((each for each, _ in expanded(step, result)), recorded, strict=True)
            _begun(scheduler).commit(step, result, unpacked(commits[-1]["done"]), commits[-1]["now"])
            at += 2 * times - 1


def _times(entries: list[Entry], start: int, step: Step) -> int:
    """Count how many times a step was scheduled and committed from `start` on, with no other input before the last commit, and
    before the plan has to look again."""
    count = 0
    wake = step.wake_at if step.wake_at is not None else inf
    while count < step.repeat and start + 2 * count + 1 < len(entries):
        first, second = entries[start + 2 * count : start + 2 * count + 2]
        if first["op"] != "schedule" or second["op"] != "commit" or (count and first["now"] >= wake):
            break
        if first.get("guesses"):
            break  # steps with guesses differ from each other
        if any(second.get(name) for name in ("failed", "exhausted", "waiting", "late")):
            break  # not every run drew a token
        count += 1
        if second["done"]:
            break
    return count


def _parsed(line: str, number: int) -> Entry:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} of the journal is not JSON: {error}") from error
    if not isinstance(entry, dict) or "op" not in entry:
        raise ValueError(f"line {number} of the journal has no `op`: {line[:60]!r}")
    return entry


def _start(entry: Entry) -> Scheduler:
    if entry["format"] != FORMAT:
        raise ValueError(f"this journal has format {entry['format']}; this program reads format {FORMAT}")
    sizes = entry["capacity"] | {"file_bytes": tuple(entry["capacity"]["file_bytes"])}
    return Scheduler(Capacity(**sizes), SchedulerOptions(**entry["settings"]))


def _begun(scheduler: Scheduler | None) -> Scheduler:
    if scheduler is None:
        raise ValueError("a journal begins with a `plan` line")
    return scheduler


def _input(op: str, entry: Entry) -> Input:
    if op not in INPUTS:
        raise ValueError(f"a journal has no {op!r} lines")
    return INPUTS[op].of(entry)


FORMAT = 2


class RecordingScheduler(Scheduler):
    """A scheduler that tells `write` of every input that it takes. Its input methods are made below, from `INPUTS`."""

    def __init__(self, capacity: Capacity, options: SchedulerOptions, write: Callable[[str], object]) -> None:
        super().__init__(capacity, options)
        self._write = write
        self.note("plan", {"format": FORMAT, "capacity": asdict(capacity), "settings": asdict(options)})

    def note(self, op: str, entry: dict[str, Any]) -> None:
        """Write a line."""
        self._write(json.dumps({"op": op, **entry}, separators=(",", ":")))

    def take(self, value: Input) -> Any:
        """Apply an input and record it. An input that is refused is none; one that fails is recorded, so that its replay
        fails too."""
        entry = value.entry() | ({"step": ""} if isinstance(value, Schedule) else {})
        try:
            found = getattr(Scheduler, value.method)(self, *value.arguments())
        except BaseException as error:
            refused = (RequestError, ValueError) if isinstance(value, Submit) else RequestError
            if not isinstance(error, refused):
                self.note(value.method, entry)
            raise
        self.note(value.method, entry | ({"step": step_digest(found)} if isinstance(value, Schedule) else {}))
        return found


def _taking(kind: type[Input]) -> Callable[..., Any]:
    def method(scheduler: RecordingScheduler, *values: Any, **named: Any) -> Any:
        return scheduler.take(kind(*values, **named))

    return method


for _kind in INPUTS.values():
    setattr(RecordingScheduler, _kind.method, _taking(_kind))
