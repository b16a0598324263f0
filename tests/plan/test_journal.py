"""A journal replayed yields the steps that were taken."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest

from afterglow.errors import RequestError
from afterglow.plan.journal.inputs import INPUTS
from afterglow.plan.journal.replaying import RecordingScheduler, replay, replay_repeated
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.options import SchedulerOptions
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import JobSpec, Load, Step
from tests.plan.fake_executor import pack
from tests.plan.server_kit import FOREVER, Server, words


class Recorded(Server):
    """A server that keeps a journal of each of its lives."""

    def __init__(self, **more: int) -> None:
        self.journals: list[list[str]] = []
        super().__init__(**more)  # type: ignore[arg-type]

    def make(self) -> Scheduler:
        lines: list[str] = []
        self.journals.append(lines)
        return RecordingScheduler(self.capacity, SchedulerOptions(**self.settings), lines.append)


def eventful() -> Recorded:
    """Two lives with everything that can happen in them."""
    server = Recorded(device_rows=96, host_slots=24, disk_bytes=10_000, prefill_chunk=8)
    server.submit(words(12), max_tokens=40)
    server.submit(words(12, 1000), max_tokens=40, salt="a")  # one job has to be sent back
    server.submit(words(20, 2000), max_tokens=3, stop_tokens=frozenset([1, 2, 3]), read=False, session="s")
    with pytest.raises(RequestError):
        server.scheduler.submit(JobSpec(99, b"", 1), server.now)
    while server.scheduler.stats().counters.preemptions == 0:
        server.step()
    server.finish()
    server.scheduler.drop_contexts()
    server.ask([*server.text(1), 7], write=False)
    server.restart()
    server.faults.load = 1.0
    server.ask([*server.text(2), 6], salt="a")  # alone, it joins while its rows are on their way
    server.faults.load = 0.0
    server.faults.delay = 2
    server.submit([*server.text(1), 7], max_tokens=6)
    server.executor.damaged = {min(server.executor.catalog)}
    server.submit([*server.text(2), 8], max_tokens=6, salt="a", priority=-1)
    cancelled = server.submit(words(50, 3000), max_tokens=9)
    server.withheld = []
    server.step()
    server.deliver()
    server.faults.load = server.faults.busy = 1.0  # reads fail, and hang on
    server.ask([*server.text(3), 9])
    step, result = server.open()
    server.cancel(cancelled)
    server.close(step, result)
    server.faults.load = 0.0
    server.finish()
    server.faults.store = 1.0
    server.scheduler.flush(server.now)
    for _ in range(10):
        server.step()
    server.faults.store = 0.0
    server.scheduler.drop_clean_host()
    server.ask([*server.text(2), 8], salt="a")
    server.scheduler.reset(server.now)
    server.finish()
    server.ask(words(12))
    return server


def test_a_replay_takes_the_same_steps() -> None:
    server = eventful()
    assert len(server.journals) == 2
    replayed = [pair for lines in server.journals for pair in replay(lines)]
    assert [step for step, _ in replayed] == server.steps
    assert [digest for _, digest in replayed] == [step_digest(step) for step in server.steps]


def test_the_journal_names_every_input() -> None:
    server = eventful()
    lines = [json.loads(line) for journal in server.journals for line in journal]
    assert {line["op"] for line in lines} == {
        "plan", "submit", "cancel", "restore", "reset", "drop_contexts", "drop_clean_host", "flush", "schedule", "recall",
        "commit", "complete",
    }  # fmt: skip
    assert sum(line["op"] == "submit" for line in lines) == len(server.specs), "a refused job is no input"
    assert any(line["op"] == "commit" and line["failed"] for line in lines)
    assert server.scheduler.stats().counters.store_failures > 0
    done = [item for line in lines for item in line.get("done", ())]
    assert any(item["kind"] == "MoveDone" and item["slots_busy"] for item in done)
    assert not any("\n" in line for journal in server.journals for line in journal)


def test_every_method_of_a_scheduler_that_changes_it_is_an_input() -> None:
    looks = {"knows", "stats", "check", "flushed", "unfinished", "unsaved", "queued", "open_step"}
    public = {name for name in vars(Scheduler) if not name.startswith("_")}
    assert public == looks | INPUTS.keys()
    for name, kind in INPUTS.items():
        parameters = list(inspect.signature(getattr(Scheduler, name)).parameters)[1:]
        assert [field.name for field in fields(kind)] == parameters


def test_extents_of_another_engine_are_an_input_too() -> None:
    other, lines = Server(disk_bytes=10_000), []
    other.ask(words(40))
    tokens = pack(words(40))
    path = [view.extent for view in other.scheduler.cache.match("", tokens).views]
    taker = RecordingScheduler(other.capacity, SchedulerOptions(digest="m"), lines.append)
    assert taker.adopt("", tokens, path, None, 1.0)
    taker.submit(JobSpec(1, tokens, 1), 2.0)
    step = taker.schedule(2.0)
    assert any(isinstance(move, Load) for move in step.moves)
    assert [found for found, _ in replay(lines)] == [step]


def test_another_input_gives_other_steps() -> None:
    server = Recorded()
    server.ask(words(30), max_tokens=5)
    lines = server.journals[0]
    (submit,) = [i for i, line in enumerate(lines) if json.loads(line)["op"] == "submit"]
    lines[submit] = lines[submit].replace('"max_tokens":5', '"max_tokens":4')
    assert any(step_digest(step) != digest for step, digest in list(replay(lines))[:6])


def test_an_input_that_fails_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its replay fails too; one that is refused is no input."""
    server = Recorded()
    with pytest.raises(RequestError):
        server.scheduler.submit(JobSpec(1, b"", 1), server.now)
    assert len(server.journals[0]) == 1

    def fails(*_: object) -> Step:
        raise ValueError("not in the list")

    monkeypatch.setattr(Scheduler, "schedule", fails)
    with pytest.raises(ValueError, match="not in the list"):
        server.scheduler.schedule(server.now)
    assert json.loads(server.journals[0][-1])["op"] == "schedule"


def test_equal_steps_have_equal_digests() -> None:
    assert step_digest(Step(1, frees=(2,))) == step_digest(Step(1, frees=(2,)))
    assert step_digest(Step(1, frees=(2,))) != step_digest(Step(1, frees=(3,)))


JOURNALS = sorted((Path(__file__).parent / "journals").glob("*.jsonl"))


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.stem)
def test_recorded_journals_lead_to_the_steps_that_were_recorded(path: Path) -> None:
    """Journals of engines and of random plans, recorded once (journals/record.py): structure changes, steps do not."""
    lines = path.read_text().splitlines()
    replayed = [(step_digest(step), digest) for step, digest in replay(lines)]
    assert len(replayed) > 50
    assert [now for now, _ in replayed] == [then for _, then in replayed]
    repeated = [(step_digest(step), digest) for step, digest in replay_repeated(lines, 1000)]
    assert repeated == replayed


def test_the_recorded_journals_cover_the_plans_inputs() -> None:
    lines = [json.loads(line) for path in JOURNALS for line in path.read_text().splitlines()]
    assert {line["op"] for line in lines} >= {
        "plan", "submit", "cancel", "restore", "reset", "recall", "flush", "schedule", "commit", "complete", "give_up",
        "pin_session", "forget_session", "register_prefix", "forget_prefix",
    }  # fmt: skip
    assert {line["settings"]["policy"] for line in lines if line["op"] == "plan"} >= {"lookahead", "lru", "fifo", "lfu"}
    specs = [line["spec"] for line in lines if line["op"] == "submit"]
    assert any(spec["selects"] for spec in specs)
    assert any(spec["scores"] for spec in specs)
    assert any(spec.get("breakpoints") for spec in specs)
    assert not all("breakpoints" in spec for spec in specs), "journals of before they were there are read too"
    assert any(line["notes"].get("mark") for line in lines if line["op"] == "recall")
    commits = [line for line in lines if line["op"] == "commit"]
    assert all(any(line.get(key) for line in commits) for key in ("failed", "exhausted", "late", "waiting"))


PLAN = Recorded().journals[0][0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([PLAN, '{"op":"sch'], "line 2 of the journal is not JSON"),
        ([PLAN, ""], "line 2 of the journal is not JSON"),
        ([PLAN, "[1, 2]"], "line 2 of the journal has no `op`: '\\[1, 2\\]'"),
        ([PLAN, '{"now":1}'], "line 2 of the journal has no `op`"),
        ([PLAN, '{"op":"dance","now":1}'], "a journal has no 'dance' lines"),
        (['{"op":"flush","now":1}', PLAN], "a journal begins with a `plan` line"),
        ([PLAN.replace('"format":2', '"format":7')], "has format 7; this program reads format 2"),
    ],
)
def test_a_line_that_is_no_journals_is_named(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(replay(lines))


def test_a_journal_that_breaks_off_is_replayed_up_to_there() -> None:
    # As after a crash: the last line may be half written.
    server = Recorded()
    server.faults.delay = FOREVER
    server.ask(words(30), max_tokens=5)
    lines = [*server.journals[0], server.journals[0][-1][:20]]
    steps = []
    with pytest.raises(ValueError, match=f"line {len(lines)} of the journal"):
        steps += [step for step, _ in replay(lines)]
    taken = replay(lines)
    for step in server.steps:
        assert next(taken)[0] == step
