"""The whole plan against an executor that knows the identity of every row: random work, tiny tiers, faults, restarts."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest

from afterglow.errors import RequestError
from afterglow.plan.journal.replaying import RecordingScheduler, replay, replay_repeated
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.prefix.salts import client_salt, is_private
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import Admitted, Emitted, Event, JobSpec
from afterglow.request import Breakpoint
from tests import doors
from tests.plan.fake_executor import VOCABULARY, FakeExecutor, Faults, answer, pack


class World:
    """Conversations, a scheduler and an executor, driven by one random seed."""

    def __init__(self, seed: int, windows: bool = False) -> None:
        """`windows`: of few rows, in some of the layers or in all."""
        self.rng = rng = random.Random(seed)
        block = rng.choice([4, 4, 8])
        table = tuple(100 + 60 * blocks for blocks in range(1, 5))
        self.capacity = Capacity(
            device_rows=rng.choice([160, 320, 800]),
            host_slots=rng.choice([0, 6, 20, 60, 400]),
            disk_bytes=rng.choice([0, 1000, 5000, 10**6]),
            file_bytes=table,
            max_extent_rows=4 * block,
            block_rows=block,
        )
        self.max_model_len = rng.choice([120, 150, 10**6])
        self.settings = {
            "policy": rng.choice(["lookahead", "lookahead", "lru", "fifo", "lfu"]),
            "write_policy": rng.choice(["write_back", "write_through", "write_through_selective"]),
            "prefill_chunk": rng.choice([0, 3, 16, 64]),
            "max_batch": rng.choice([1, 3, 8]),
            "max_model_len": self.max_model_len,
            "digest": "m",
            "warm_start": rng.random() < 0.5,
            "tenant_quota": rng.choice([None, None, 1500]),
            "tenant_pins": rng.choice([None, 0.3]),
            "relative_positions": rng.random() < 0.9,
            "source": rng.choice(["auto", "auto", "auto", "load", "recompute"]),
            "preload": rng.choice(["layerwise", "layerwise", "layerwise", "whole"]),
            "read_buffer": rng.choice([None, None, None, 0, 3]),
        }
        self.forgetting = 0.002  # a chance that the device forgets all contexts, and host all that is on disk
        if windows:
            self.put_windows(random.Random(seed))
        chance = rng.choice([0.0, 0.0, 0.1, 0.4])
        self.faults = Faults(
            load=chance,
            store=chance,
            save=chance / 4,
            drop=chance / 2,
            delay=rng.choice([0, 3, 8]),
            late=rng.choice([0.0, 0.5]),
            exhausted=rng.choice([0.0, 0.0, 0.05]),
            lazy_saves=rng.random(),
            seconds=rng.choice([0.01, 1.0, 30.0]),
            why=rng.choice(["damage", "io", "timeout", "refused"]),
        )
        if not windows:
            rows = random.Random(seed + 2).choice([0, 0, 32, 400])
            self.capacity = replace(self.capacity, read_buffer_rows=rows)
        self.settings["shared_pages"] = random.Random(seed + 1).random() < 0.6
        self.executor = self.machine()
        self.cancels = rng.choice([0.0, 0.02])
        self.arrivals = rng.choice([0.05, 0.3])
        self.volatile = rng.choice([0.0, 0.0, 0.5])  # a chance of rows that are wanted in memory only
        self.marking = random.Random(seed)  # of its own: worlds without breakpoints stay as they are
        self.breakpoints = self.marking.choice([0.0, 0.5, 0.9])  # a chance of each
        self.guessing = self.marking.choice([0.0, 0.3, 0.9])  # a chance of guesses of each decoding job
        self.journals: list[list[str]] = []
        self.digests: list[str] = []
        self.now = 0.0
        self.last_job = 0
        self.specs: dict[int, JobSpec] = {}
        self.originals: dict[int, list[int]] = {}  # prompts as they were asked for
        self.notes: dict[str, dict[str, str]] = {}
        self.answers: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.admitted: dict[int, Admitted] = {}
        systems = [self.words(rng.randint(0, 30)) for _ in range(2)]
        self.histories = [(rng.choice(["", "a", "b"]), list(rng.choice(systems))) for _ in range(rng.randint(2, 8))]
        self.hits = [0, 0, 0]
        self.steps = 0
        self.scheduler = self.start()

    def put_windows(self, rng: random.Random) -> None:
        """Loads leave rows out, or the device holds the last rows alone, or both; and much is loaded."""
        layers, window, stride = 3, rng.choice([1, 5, 12, 30]), rng.choice([1, 4, 16])
        most = window + stride + rng.choice([1, 7, 20])
        held = {"layers": layers, "window_layers": rng.randint(1, layers), "window_rows": most, "window_stride": stride}
        lean = {"window_block_bytes": 40}
        self.capacity = replace(self.capacity, **rng.choice([held, lean, {**held, **lean}]))
        self.settings["sliding_window"] = window
        if self.capacity.window_block_bytes:
            self.capacity = replace(self.capacity, host_slots=rng.choice([20, 60, 400]), disk_bytes=10**6)
            self.settings["source"] = rng.choice(["auto", "load", "load"])
            self.forgetting = rng.choice([0.02, 0.1])

    def machine(self) -> FakeExecutor:
        window = int(self.settings.get("sliding_window", 0))  # type: ignore[call-overload]
        return FakeExecutor(self.capacity, self.rng, self.faults, window, bool(self.settings["shared_pages"]))

    def words(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def start(self) -> Scheduler:
        lines: list[str] = []
        self.journals.append(lines)
        return RecordingScheduler(self.capacity, SchedulerOptions(**self.settings), lines.append)

    # ---------------------------------------------------------------------------------------------- input

    def submit(self) -> None:
        rng = self.rng
        salt, history = rng.choice(self.histories)
        prompt = [*history, *self.words(rng.randint(1, rng.choice([2, 40])))]
        if rng.random() < 0.15:  # a client edits the conversation
            prompt = prompt[: rng.randint(1, len(prompt))]
        longest = min(self.max_model_len - 1, self.capacity.device_rows // self.capacity.block_rows * 4, 130)
        cut = self.max_model_len < 1000 and rng.random() < 0.3
        if cut:
            prompt = prompt[: 2 * longest]
        else:
            prompt = prompt[: min(longest, self.capacity.device_rows - 8)]
        self.last_job += 1
        spec = JobSpec(
            self.last_job,
            pack(prompt),
            max_tokens=rng.choice([0, 1, 2, 10, 40]),
            stop_tokens=frozenset([0, 1]),
            salt=salt,
            read=rng.random() < 0.95,
            write=rng.random() < 0.95,
            priority=rng.choice([0, 0, 0, 1]),
            session=rng.choice([None, None, "s", "t", "u"]),
            ttl=rng.choice([None, None, None, 5.0, 40.0]),
            volatile=rng.random() < self.volatile,
            aside=rng.random() < 0.05,
            tie=rng.choice([0, 0, 7]),
            truncation=cut,
            turns=tuple(sorted(rng.sample(range(len(prompt)), min(len(prompt), rng.randint(0, 6))))) if cut else (),
            breakpoints=self.marks(len(prompt)),
        )
        try:
            self.scheduler.submit(spec, self.now)
        except RequestError:
            assert cut
            return
        self.originals[spec.job] = prompt
        job = doors.jobs_of(self.scheduler)[spec.job]
        self.specs[spec.job] = spec = job.spec  # as it was cut
        self.answers[spec.job] = []
        self.executor.submit(spec, job.head)

    def marks(self, rows: int) -> tuple[Breakpoint, ...]:
        """Breakpoints of a prompt: at its end, where system prompts end, or anywhere."""
        rng = self.marking
        if rng.random() >= self.breakpoints:
            return ()
        places = {rows, min(rows, 16), rng.randint(1, rows)}
        return tuple(Breakpoint(row, rng.choice([5.0, 60.0])) for row in sorted(places) if rng.random() < 0.6)

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Admitted):
                assert event.job not in self.admitted
                self.admitted[event.job] = event
                found = event.device + event.host + event.disk
                assert found < len(self.specs[event.job].prompt) // 4 + len(self.answers[event.job])
                self.hits = [
                    self.hits[0] + event.device,
                    self.hits[1] + event.host,
                    self.hits[2] + event.disk,
                ]
                continue
            assert event.job not in self.ends
            if event.token is not None:
                self.answers[event.job].append(event.token)
            if event.finish is not None:
                self.ends[event.job] = event.finish
                self.finish(event)

    def finish(self, event: Emitted) -> None:
        spec = self.specs[event.job]
        made = self.answers[event.job]
        expected, why = answer(spec, self.max_model_len)
        length = len(spec.prompt) // 4 + len(made)
        if is_private(spec.salt):
            assert made == self.executor.texts[event.job].tokens[length - len(made) : length]
        elif event.finish in ("cancelled", "no_memory"):
            assert made == expected[: len(made)]
        elif made == expected:
            assert event.finish == why
        else:  # the device was too small for it
            assert event.finish == "length"
            assert made == expected[: len(made)]
            assert length > self.scheduler.cache.device.most
        text = self.originals[event.job] + made
        if len(text) < (200 if spec.truncation else 90) and self.rng.random() < 0.8:
            place = self.rng.randrange(len(self.histories))
            self.histories[place] = (client_salt(spec.salt), text)

    # ----------------------------------------------------------------------------------------------- time

    def turn(self) -> None:
        """One step, and what happens around it."""
        step = self.scheduler.schedule(self.now, guesses=self.guesses())
        self.digests.append(step_digest(step))
        self.scheduler.check()
        result = self.executor.execute(step)
        self.steps += 1
        quiet = step.idle and not self.executor.busy
        if self.rng.random() < self.cancels:  # in the middle of a step
            self.cancel()
            quiet = False
        if self.rng.random() < 0.2:
            self.take(self.scheduler.complete(self.executor.tick(), self.now))
            self.scheduler.check()
        self.now += self.rng.random()
        done = self.executor.tick()
        if step.runs or self.rng.random() < 0.5:
            self.take(self.scheduler.commit(step, result, done, self.now))
        else:
            self.take(self.scheduler.complete(done, self.now))
        self.scheduler.check()
        if quiet:
            assert self.scheduler.unfinished == 0, "nothing moves and a job waits"

    def guesses(self) -> dict[int, tuple[int, ...]]:
        """What decoding jobs may draw next: right, wrong from some place on, or of jobs that are gone."""
        found: dict[int, tuple[int, ...]] = {}
        if not self.guessing:
            return found
        for number, job in doors.jobs_of(self.scheduler).items():
            if job.state == "decoding" and self.marking.random() < self.guessing:
                tokens = self.executor.foresee(number, self.marking.randint(1, 9))
                if self.marking.random() < 0.5:
                    tokens[self.marking.randrange(len(tokens))] += 1
                found[number] = tuple(tokens)
        if self.marking.random() < 0.1:
            found[self.last_job + 1] = (3, 4)
        return found

    def cancel(self) -> None:
        live = [job for job in self.specs if job not in self.ends]
        if live:
            self.take(self.scheduler.cancel(self.rng.choice(live), self.now))
            self.scheduler.check()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            while self.scheduler.unfinished < 12 and self.rng.random() < self.arrivals:
                self.submit()
            if self.rng.random() < self.cancels:
                self.cancel()
            if self.rng.random() < 0.002:
                self.scheduler.reset(self.now, self.rng.choice([None, "", "a"]))
                self.scheduler.check()
            if self.rng.random() < 0.01:
                self.manage()
                self.scheduler.check()
            if self.rng.random() < self.forgetting:
                self.scheduler.drop_contexts()
                self.scheduler.drop_clean_host()
                self.scheduler.check()
            self.turn()

    def manage(self) -> None:
        """What an operator may do with conversations."""
        tenant, name = self.rng.choice(["", "a", "b"]), self.rng.choice(["s", "t", "u"])
        known = {state.name for state in self.scheduler.cache.sessions.listing(tenant)}
        if self.rng.random() < 0.5:
            deleted = self.scheduler.forget_session(tenant, name)  # also of one whose first turn runs
            assert deleted or name not in known
        else:
            with suppress(RequestError):  # there is no room for what it would pin
                assert self.scheduler.pin_session(tenant, name, self.rng.random() < 0.3) == (name in known)

    def drain(self) -> None:
        for _ in range(20_000):
            if not self.scheduler.unfinished and not self.executor.busy:
                break
            self.turn()
        else:
            raise AssertionError("it never ends")
        assert all(job in self.ends for job in self.specs)

    def restart(self) -> None:
        """With or without a flush; files survive."""
        self.drain()
        flush = self.rng.random() < 0.7
        if flush:
            self.scheduler.flush(self.now)
            for _ in range(1000):
                self.turn()
                if self.scheduler.flushed:
                    break
            else:
                raise AssertionError("the flush never ends")
        else:
            self.turn()  # hands out the rest
        while self.executor.busy:
            self.executor.tick()
        old = self.executor
        if self.capacity.disk_bytes:
            self.capacity = replace(self.capacity, disk_bytes=self.rng.choice([600, 1000, 5000, 10**6]))
        self.executor = self.machine()
        self.executor.files, self.executor.catalog = old.files, old.catalog
        self.executor.most = sum(record.file_bytes for record in old.catalog.values())
        for kind, key, value in self.scheduler.cache.take_notes(last=flush):
            if value is None:
                self.notes.get(kind, {}).pop(key, None)
            else:
                self.notes.setdefault(kind, {})[key] = value
        self.scheduler = self.start()
        records = list(old.catalog.values())
        self.rng.shuffle(records)
        for record in self.scheduler.restore(records, self.now):
            del self.executor.files[record.id], self.executor.catalog[record.id]
        self.scheduler.recall(self.notes)
        self.scheduler.check()

    def check_journals(self) -> None:
        replayed = [pair for lines in self.journals for pair in replay(lines)]
        assert [digest for _, digest in replayed] == self.digests
        assert [step_digest(step) for step, _ in replayed] == self.digests
        repeated = [step_digest(step) for lines in self.journals for step, _ in replay_repeated(lines, 1000)]
        assert repeated == self.digests


def live(seed: int, steps: int, restarts: int, windows: bool = False) -> World:
    world = World(seed, windows)
    for _ in range(restarts):
        world.run(steps)
        world.restart()
    world.run(steps)
    world.drain()
    world.check_journals()
    return world


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_right_whatever_happens(seed: int) -> None:
    live(seed, steps=120, restarts=1)


@pytest.mark.parametrize("seed", range(200, 224))
def test_what_windows_show_is_there_whatever_happens(seed: int) -> None:
    """Loads leave out rows before windows, and the device gives them up; no query sees one, and no file or copy is made of such
    rows."""
    live(seed, steps=120, restarts=1, windows=True)


@pytest.mark.parametrize("seed", range(100, 106))
def test_guesses_change_no_row(seed: int) -> None:
    world = World(seed)
    world.guessing, world.arrivals = 0.9, 0.3  # a world of few jobs has few guesses
    world.run(150)
    world.drain()
    assert world.executor.void > 10
    world.check_journals()


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_every_row_is_right_for_a_long_time() -> None:
    hits = [0, 0, 0]
    for seed in range(1000, 1400):
        world = live(seed, steps=400, restarts=2)
        hits = [a + b for a, b in zip(hits, world.hits, strict=True)]
    assert all(hits)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_what_windows_show_is_there_for_a_long_time() -> None:
    skipped = 0
    for seed in range(2000, 2300):
        skipped += live(seed, steps=300, restarts=2, windows=True).executor.skipped
    assert skipped > 100
