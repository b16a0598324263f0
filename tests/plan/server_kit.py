"""A scheduler and the fake executor, driven step by step by a test. Nothing here is left to chance.

Prompts are lists of tokens, generated tokens are those of `fake_executor.sample`; that a job gathers only rows of its
own tokens the executor asserts at each step, that its answer is the right one `Server.finish` does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.prefix.salts import is_private
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import Admitted, Emitted, Event, JobSpec, Load, Run, Step, StepResult, TransferDone
from tests import doors
from tests.plan.fake_executor import FakeExecutor, Faults, answer, pack
from tests.plan.tiers_kit import FILE_BYTES

FOREVER = 10**9


class Steady(random.Random):
    """Chances of faults: 0 is never, 1 always; and everything takes as long as it may."""

    def random(self) -> float:
        return 0.5

    def randint(self, a: int, b: int) -> int:
        return b


class Server:
    """One engine. `more` are settings of the scheduler."""

    def __init__(
        self,
        *,
        device_rows: int = 400,
        host_slots: int = 100,
        disk_bytes: int = 0,
        block: int = 4,
        **more: object,
    ) -> None:
        self.capacity = Capacity(device_rows, host_slots, disk_bytes, FILE_BYTES, 4 * block, block)
        self.faults = Faults(delay=0, lazy_saves=0.0)
        self.executor = FakeExecutor(self.capacity, Steady(), self.faults)
        self.settings = {"max_model_len": 10**6, "digest": "m", **more}
        self.scheduler = self.make()
        self.now = 0.0
        self.steps: list[Step] = []
        self.specs: dict[int, JobSpec] = {}
        self.made: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.admitted: dict[int, Admitted] = {}
        self.row_seconds: float | None = None  # what computing a row takes; None: every step takes a second
        self.gather_seconds = 0.0  # beside that, what gathering a row takes
        self.withheld: list[TransferDone] | None = None  # completions that are kept back, if any are

    def make(self) -> Scheduler:
        return Scheduler(self.capacity, SchedulerOptions(**self.settings))

    # ------------------------------------------------------------------------------------------------ wishes

    def submit(self, prompt: Sequence[int], max_tokens: int = 1, **more: object) -> int:
        job = len(self.specs) + 1
        spec = JobSpec(job, pack(list(prompt)), max_tokens, **more)  # type: ignore[arg-type]
        self.scheduler.submit(spec, self.now)
        spec = doors.jobs_of(self.scheduler)[job].spec  # as it was cut, if it was
        self.specs[job], self.made[job] = spec, []
        self.executor.submit(spec)
        return job

    def cancel(self, job: int) -> list[Event]:
        events = self.scheduler.cancel(job, self.now)
        self.take(events)
        self.scheduler.check()
        return events

    def ask(self, prompt: Sequence[int], max_tokens: int = 1, **more: object) -> int:
        """A job that has this server to itself."""
        job = self.submit(prompt, max_tokens, **more)
        self.finish()
        return job

    # ------------------------------------------------------------------------------------------------- steps

    def open(self) -> tuple[Step, StepResult]:
        """A step is handed out and carried out, but not committed."""
        step = self.scheduler.schedule(self.now)
        self.steps.append(step)
        self.scheduler.check()
        return step, self.executor.execute(step)

    def close(self, step: Step, result: StepResult) -> list[Event]:
        rows = sum(len(run.tokens) for run in step.runs)
        gathered = sum(gather.stop - gather.start for run in step.runs for gather in run.gathers)
        computing = 1.0 if self.row_seconds is None else 0.001 + self.row_seconds * rows
        self.now += computing + self.gather_seconds * gathered
        done = self.executor.tick()
        if self.withheld is not None:
            self.withheld += done
            done = []
        events = self.scheduler.commit(step, result, done, self.now)
        self.take(events)
        self.scheduler.check()
        return events

    def step(self) -> Step:
        step, result = self.open()
        self.close(step, result)
        return step

    def deliver(self) -> None:
        """Completions that were kept back arrive; later ones are not kept back any more."""
        done, self.withheld = self.withheld or [], None
        self.take(self.scheduler.complete(done, self.now))
        self.scheduler.check()

    def finish(self) -> None:
        """Until every job has ended, with the tokens that it would have had without any cache; then all moves end."""
        for _ in range(2000):
            if not self.scheduler.unfinished:
                break
            self.step()
        assert self.scheduler.unfinished == 0, "a job waits for a move that will never end"
        self.faults.delay = 0
        for pending in self.executor.pending.values():
            pending.ticks = 0
        while not self.step().idle or self.executor.busy or self.scheduler.stats().moves_in_flight:
            pass
        for job, why in self.ends.items():
            if is_private(self.specs[job].salt):
                continue  # depends on the rows that could be kept
            expected = answer(self.specs[job], self.scheduler.max_model_len)
            if why == "cancelled":
                assert self.made[job] == expected[0][: len(self.made[job])]
            else:
                assert (self.made[job], why) == expected

    def restart(self) -> None:
        """Everything to disk, and a new process."""
        self.finish()
        self.scheduler.flush(self.now)
        for _ in range(100):
            self.step()
            if self.scheduler.flushed:
                break
        old = self.executor
        self.executor = FakeExecutor(self.capacity, Steady(), self.faults)
        self.executor.files, self.executor.catalog, self.executor.texts = old.files, old.catalog, old.texts
        notes: dict[str, dict[str, str]] = {}
        for kind, key, value in self.scheduler.cache.take_notes():
            if value is not None:
                notes.setdefault(kind, {})[key] = value
        self.scheduler = self.make()
        assert self.scheduler.restore(list(old.catalog.values()), self.now) == []
        self.scheduler.recall(notes)

    # --------------------------------------------------------------------------------------------- looking on

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Admitted):
                assert event.job not in self.admitted, "told twice"
                self.admitted[event.job] = event
                continue
            assert event.job not in self.ends, "it had ended"
            if event.token is not None:
                self.made[event.job].append(event.token)
            if event.finish is not None:
                self.ends[event.job] = event.finish

    def text(self, job: int) -> list[int]:
        """Its prompt and what it has generated."""
        return self.executor.texts[job].tokens

    def hits(self, job: int) -> tuple[int, int, int]:
        """Rows found on the device, in host and on disk, as the caller was told."""
        told = self.admitted[job]
        return told.device, told.host, told.disk

    def runs(self, job: int) -> list[Run]:
        return [run for step in self.steps for run in step.runs if run.job == job]

    def computed(self, job: int) -> int:
        """Rows that were computed for a job."""
        return sum(len(run.tokens) for run in self.runs(job))

    def loads(self) -> list[Load]:
        return [move for step in self.steps for move in step.moves if isinstance(move, Load)]

    def nothing_left_behind(self) -> None:
        """No job, no draft, no pin and no row but those of retained contexts and of extents."""
        self.finish()
        stats = self.scheduler.stats()
        assert (stats.waiting, stats.loading, stats.running) == (0, 0, 0)
        assert (stats.saves_in_flight, stats.moves_in_flight) == (0, 0)
        self.scheduler.reset(self.now)
        self.finish()
        stats = self.scheduler.stats()
        assert (stats.extents, stats.contexts, stats.device_rows, stats.host_slots, stats.disk_bytes) == (0, 0, 0, 0, 0)


def words(count: int, first: int = 100) -> list[int]:
    """Tokens that no other call with another `first` gives (nor does any job generate them)."""
    return [first + i for i in range(count)]


def jobs_of(step: Step) -> list[int]:
    return [run.job for run in step.runs]


def tokens_of(events: Sequence[Event]) -> list[int | None]:
    return [event.token for event in events if isinstance(event, Emitted)]
