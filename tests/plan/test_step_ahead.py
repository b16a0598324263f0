"""Steps after which the next one may be launched at once, since the plan knows what it will be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from afterglow.plan.journal.replaying import replay
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.step import Step
from tests.plan.server_kit import Server, jobs_of, words
from tests.plan.test_journal import Recorded


def submitted(server: Server, *jobs: dict[str, object]) -> Server:
    """Give a server jobs with these values."""
    for number, about in enumerate(jobs):
        server.submit(words(5, 1000 * (number + 1)), **{"max_tokens": 9, "plain": True, **about})  # type: ignore[arg-type]
    return server


def steps_of(server: Server) -> list[Step]:
    server.finish()
    return [step for step in server.steps if step.runs]


def test_the_next_step_comes_as_foreseen() -> None:
    """Not foreseen is what follows prefills. Replies end at different rows; behind the last token of all is nothing."""
    server = submitted(Server(step_ahead=True), {"max_tokens": 12}, {"max_tokens": 4})
    steps = steps_of(server)
    assert [step.decodes_on for step in steps] == [False, *[True] * 10, False]
    for step, following in zip(steps[1:-1], steps[2:], strict=True):
        assert {(run.job, run.start) for run in following.runs} <= {(run.job, run.start + 1) for run in step.runs}


@pytest.mark.parametrize(
    ("jobs", "settings"),
    [
        pytest.param([{}, {"plain": False}], {}, id="a grammar or log-probabilities"),
        pytest.param([{"max_tokens": 2}, {"max_tokens": 2}], {}, id="both end"),
        pytest.param([{}, {}], {"step_ahead": False}, id="off"),
    ],
)
def test_a_step_that_decodes_is_followed_by_what_is_not_known(
    jobs: Sequence[dict[str, object]], settings: dict[str, object]
) -> None:
    server = submitted(Server(**{"step_ahead": True, **settings}), *jobs)  # type: ignore[arg-type]
    server.step()
    step = server.step()
    assert jobs_of(step) == [1, 2]
    assert not step.decodes_on


def test_the_next_row_needs_room() -> None:
    steps = steps_of(submitted(Server(step_ahead=True), {"max_tokens": 60}))
    without = [run for step in steps[1:-1] if not step.decodes_on for run in step.runs]
    assert len(without) == 3
    assert all(run.start + 1 == run.capacity for run in without)


def test_guesses_are_not_followed_at_once() -> None:
    server = submitted(Server(step_ahead=True), {})
    server.step()
    step = server.scheduler.schedule(server.now, guesses={1: [7, 8]})
    assert step.runs[0].guessed == 2
    assert not step.decodes_on


def test_a_journal_has_it() -> None:
    server = submitted(Recorded(step_ahead=True), {}, {})
    server.finish()
    replayed = list(replay(server.journals[0]))
    assert [step for step, _ in replayed] == server.steps
    foreseen = next(step for step in server.steps if step.decodes_on)
    assert step_digest(foreseen) != step_digest(replace(foreseen, decodes_on=False))
