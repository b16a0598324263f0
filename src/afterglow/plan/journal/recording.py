"""A scheduler that records its inputs. Lines come out one by one; this file knows no file on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from afterglow.errors import RequestError
from afterglow.plan.journal.inputs import INPUTS, Input, Schedule, Submit
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.scheduler import Scheduler

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
