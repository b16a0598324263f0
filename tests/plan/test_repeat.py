"""Steps that are carried out repeatedly before they are committed, as a simulator does, are the steps of an engine."""

from __future__ import annotations

from typing import Any

import pytest

from afterglow.plan.journal.replaying import replay_repeated
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import Run
from tests.plan.server_kit import words
from tests.plan.test_journal import Recorded, eventful


def busy(disk_bytes: int) -> Recorded:
    """Conversations whose turns decode side by side, on tiers that hold half of their rows."""
    server = Recorded(device_rows=400, host_slots=60, disk_bytes=disk_bytes, prefill_chunk=8, policy="lookahead")  # type: ignore[arg-type]
    for turn in range(3):
        for talk in range(5):
            if turn:
                server.submit([*server.text(5 * (turn - 1) + talk + 1), 7], max_tokens=23 + 7 * talk)
            else:
                server.submit(words(10 + talk, 100 * talk), max_tokens=30 + 11 * talk)
            if talk % 2:
                server.step()
        server.finish()
    return server


@pytest.mark.parametrize("limit", [1, 2, 1000])
@pytest.mark.parametrize("make", [eventful, lambda: busy(0), lambda: busy(30_000)])
def test_repeated_steps_are_the_engines(limit: int, make: object) -> None:
    server: Recorded = make()  # type: ignore[operator]
    pairs = [pair for lines in server.journals for pair in replay_repeated(lines, limit)]
    assert [step_digest(step) for step, _ in pairs] == [recorded for _, recorded in pairs]
    assert [step for step, _ in pairs] == server.steps


def test_uneventful_steps_are_advanced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    server = busy(0)
    calls = 0
    schedule = Scheduler.schedule

    def counting(self: Scheduler, *values: Any) -> object:
        nonlocal calls
        calls += 1
        return schedule(self, *values)

    monkeypatch.setattr(Scheduler, "schedule", counting)
    steps = [step for lines in server.journals for step, _ in replay_repeated(lines, 1000)]
    assert calls < 0.75 * len(steps)


def test_jobs_that_need_room_soon_are_given_it_together() -> None:
    server = Recorded(device_rows=400, host_slots=60, prefill_chunk=32)
    for length in (8, 7, 1):  # two jobs reach the end of their blocks of four rows one after the other
        server.submit(words(length, 100 * length), max_tokens=60)
    server.finish()
    first, second, third = ([run for step in server.steps for run in step.runs if run.job == job] for job in (1, 2, 3))

    def grown(runs: list[Run]) -> list[int]:
        """At how many rows a segment had grown."""
        return [b.start for a, b in zip(runs, runs[1:], strict=False) if b.capacity > a.capacity]

    assert grown(first)[0] == 24
    assert grown(second)[0] == 23  # a row before it had to be
    assert grown(third)[0] == 20
