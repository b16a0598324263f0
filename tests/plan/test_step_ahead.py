"""Steps after which the next one may be launched at once, since the plan knows what it will be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from afterglow.plan.journal.replaying import replay, replay_repeated
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


def test_a_prompt_whose_last_row_alone_is_computed_is_not_followed_at_once() -> None:
    server = Server(step_ahead=True)
    server.ask(words(9), 3, plain=True)
    server.submit(words(9), 3, plain=True)
    step = server.step()
    assert [len(run.tokens) for run in step.runs] == [1]
    assert not step.decodes_on


def test_where_guesses_come_and_go_every_other_step_is_followed_at_once() -> None:
    """A step with guesses drops what was launched."""
    server = submitted(Server(step_ahead=True), {"max_tokens": 30})
    server.step()
    found = []
    for guesses in ((), (), (7, 8), (), (), (7, 8), (7, 8), (), ()):
        step = server.scheduler.schedule(server.now, guesses={1: guesses})
        assert [run.guessed for run in step.runs] == [len(guesses)]
        found.append(step.decodes_on)
        server.close(step, server.executor.execute(step))
    assert found == [True, True, False, False, True, False, False, False, True]


def test_a_journal_has_it() -> None:
    """Also of steps that are replayed many at a time: room and replies end among them, and a request comes."""
    server = submitted(Recorded(step_ahead=True), *({"max_tokens": most, "write": False} for most in (60, 9)))
    for _ in range(4):
        server.step()
    submitted(server, {"max_tokens": 20, "write": False})
    server.finish()
    (lines,) = server.journals
    assert [step for step, _ in replay(lines)] == server.steps
    for limit in (1, 2, 7, 4096):
        assert [step for step, _ in replay_repeated(lines, limit)] == server.steps
    foreseen = next(step for step in server.steps if step.decodes_on)
    assert step_digest(foreseen) != step_digest(replace(foreseen, decodes_on=False))
