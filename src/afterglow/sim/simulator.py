"""The event loop: a workload, the plan's scheduler, and a modelled machine in place of the engine's runner and store.

It also takes an engine's journal through the plan: the same steps, or it is not the same policy.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any

from afterglow.errors import RequestError
from afterglow.plan.journal.replaying import replay_repeated
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.prefix.truncation import Cut
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.stats import Counters
from afterglow.plan.step import Admitted, Event, JobSpec, Step
from afterglow.sim.engine_setup import Setup
from afterglow.sim.executor import Executor
from afterglow.sim.workload.turns import Arrival, Workload, token_bytes


@dataclass(slots=True)
class _LiveJob:
    """A turn under way."""

    arrival: Arrival
    job: int
    prompt: int
    first: float = 0.0  # when its first token was there
    began: float = -1.0  # when the step began that admitted it
    cached: tuple[int, int, int] = (0, 0, 0)
    dropped: int = 0  # tokens of the prompt that its window had no room for


@dataclass
class Outcome:
    """What came of a workload. Columns have one number per counted turn, in the order in which they ended.

    `history`: prompt tokens that an earlier turn of the conversation had; of these and of all others `device`, `host`
    and `disk` were cached there. `waited`: seconds from arrival to the pass that admitted it; `ttft`: to the first token.
    `cut_turns` did not fit the model's window: `cut_tokens` of their prompts were left out, which no other figure counts.
    `refused`, `events`, `steps`, seconds and bytes are those after the warm-up, too; `counters` are of everything.
    """

    turns: int = 0
    refused: int = 0
    skipped: int = 0  # of the warm-up
    first_turns: int = 0
    ended: float = 0.0  # seconds simulated
    prefilling: float = 0.0
    decoding: float = 0.0
    stalled: float = 0.0
    events: int = 0  # steps scheduled and completions taken in
    steps: int = 0  # repeated ones counted as often
    prompt_tokens: int = 0
    new_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    cut_turns: int = 0
    cut_tokens: int = 0
    bytes_moved: dict[str, int] = field(default_factory=dict)
    counters: Counters | None = None
    queue_seconds: float = 0.0  # waiting turns, times the seconds they were so many
    prefetch_window: int = 0
    eviction_window: int = 0
    ttft: array[float] = field(default_factory=lambda: array("d"))
    waited: array[float] = field(default_factory=lambda: array("d"))
    history: array[int] = field(default_factory=lambda: array("q"))
    device: array[int] = field(default_factory=lambda: array("q"))
    host: array[int] = field(default_factory=lambda: array("q"))
    disk: array[int] = field(default_factory=lambda: array("q"))
    prompts: array[int] = field(default_factory=lambda: array("q"))


class Simulation:
    """One engine serving one workload."""

    # The plan may learn this many seconds late of transfers that no job waits for: several decode steps then advance at once.
    late = 0.25

    def __init__(
        self, setup: Setup, workload: Workload, *, warm_up: int = 0, scheduler: Scheduler | None = None
    ) -> None:
        """`warm_up`: turns that are not counted, the first ones to end."""
        self.setup = setup
        self.workload = workload
        self.scheduler = scheduler or setup.scheduler()
        self.executor = Executor(setup.machine(), setup.passes())
        self.now = 0.0
        self.outcome = Outcome()
        self._warm_up = warm_up
        self._jobs: dict[int, _LiveJob] = {}
        self._last_job = 0
        self._marks = (0.0, 0.0, 0.0, 0.0)  # time, prefilling, decoding, stalled when the warm-up ended
        self._bytes_before: dict[str, int] = {}  # what `_carried` said then

    def run(self, progress: Callable[[Simulation], object] | None = None, every: int = 500) -> Outcome:
        """To the end of the workload. `progress` is called now and then."""
        rounds = 0
        while not self.workload.exhausted:
            self.advance()
            rounds += 1
            if progress is not None and rounds % every == 0:
                progress(self)
        return self.finish()

    @property
    def next_arrival(self) -> float:
        """When a turn arrives, as far as that is known; infinity: never."""
        arrival = self.workload.peek()
        return arrival if arrival is not None else inf

    def heard(self, step: Step, arrival: float) -> float:
        """When the plan is told of an arrival: somewhat late while decodes run that the turn could not join."""
        return arrival + self.late if self.scheduler.outlook.closed and step.repeat > 1 else arrival

    def next_look(self, step: Step) -> float:
        """When the plan is asked again, if this step does not end before; infinity: never.

        The end of a transfer that no job waits for is reported somewhat late.
        """
        moved = self.executor.next_event
        if step.repeat > 1 and not self.scheduler.outlook.awaited:
            moved += self.late
        return min(moved, self.heard(step, self.next_arrival), step.wake_at if step.wake_at is not None else inf)

    def advance(self) -> None:
        """One step, or to the next event."""
        step = self.begin()
        later = self.next_look(step)
        if step.runs:
            self.compute(step, later)
        elif later < inf:
            self.idle_until(later)
        elif step.idle and not self.workload.exhausted:
            raise RuntimeError("the simulation stands still: turns wait, and nothing is going to happen")

    def begin(self) -> Step:
        """Take in arrivals and ended transfers; return the next step, whose transfers have begun."""
        self._arrive()
        done = self.executor.take(self.now)
        if done:
            self.outcome.events += len(done)
            self._tell(self.scheduler.complete(done, self.now))
        step = self.scheduler.schedule(self.now, REPEATS)
        self.outcome.events += 1
        self.executor.start(step, self.now)
        return step

    def compute(self, step: Step, until: float) -> None:
        """Run a step, again and again if it may be, the last time before `until`."""
        began = self.now
        end, result = self.executor.run(step, began, until)
        for run in step.runs:
            if run.admit is not None:
                self._jobs[run.job].began = began
        self.outcome.steps += result.repeats
        self.idle_until(end)
        done = self.executor.take(end)
        self.outcome.events += len(done)
        self._tell(self.scheduler.commit(step, result, done, end))

    def idle_until(self, until: float) -> None:
        """Time passes; it never goes back."""
        until = max(until, self.now)
        self.outcome.queue_seconds += (until - self.now) * self.scheduler.queued
        self.now = until

    def _arrive(self) -> None:
        for arrival in self.workload.take(self.now):
            self._submit(arrival)

    def _submit(self, arrival: Arrival) -> Cut | None:
        """Queue a turn. How its prompt was cut, if it was."""
        turn = arrival.turn
        self._last_job += 1
        job = self._last_job
        prompt = token_bytes(turn.prompt)
        reuse = self.setup.mode != "recompute"
        spec = JobSpec(
            job,
            prompt,
            turn.output_tokens,
            read=reuse,
            write=reuse,
            ttl=self.setup.ttl,
            truncation=self.setup.truncate,
            turns=turn.turns,
            breakpoints=turn.breakpoints,
        )
        try:
            found = self.scheduler.submit(spec, self.now)
        except RequestError:
            self.outcome.refused += 1
            self.workload.finished(turn.session, self.now)
            return None
        self.executor.expect(job, token_bytes(turn.reply), arrival.time)
        self._jobs[job] = _LiveJob(arrival, job, len(prompt) // 4)
        return found

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            live = self._jobs[event.job]
            if isinstance(event, Admitted):
                live.cached = (event.device, event.host, event.disk + event.shared)  # on their way they leave a file
                live.prompt -= event.dropped
                live.dropped += event.dropped
                continue
            live.first = live.first or self.now
            if event.finish is not None:
                del self._jobs[event.job]
                self.executor.forget(event.job)
                self._count(live)
                self.workload.finished(live.arrival.turn.session, self.now)

    def _count(self, live: _LiveJob) -> None:
        outcome = self.outcome
        if outcome.skipped < self._warm_up:
            outcome.skipped += 1
            if outcome.skipped == self._warm_up:
                self._count_from_here()
            return
        turn = live.arrival.turn
        device, host, disk = live.cached
        history = max(0, live.prompt - turn.new_tokens) if turn.index else 0
        outcome.turns += 1
        outcome.first_turns += turn.index == 0
        outcome.prompt_tokens += live.prompt
        outcome.new_tokens += min(turn.new_tokens, live.prompt)
        outcome.computed_tokens += live.prompt - device - host - disk
        outcome.output_tokens += turn.output_tokens
        outcome.cut_turns += live.dropped > 0
        outcome.cut_tokens += live.dropped
        outcome.ttft.append(live.first - live.arrival.time)
        outcome.waited.append(live.began - live.arrival.time)
        outcome.history.append(history)
        outcome.device.append(device)
        outcome.host.append(host)
        outcome.disk.append(disk)
        outcome.prompts.append(live.prompt)

    def _count_from_here(self) -> None:
        """The warm-up has ended: nothing before counts."""
        outcome, executor = self.outcome, self.executor
        self._marks = (self.now, executor.prefilling, executor.decoding, executor.stalled)
        self._bytes_before = self._carried()
        outcome.queue_seconds = 0.0
        outcome.refused = outcome.events = outcome.steps = 0

    def finish(self) -> Outcome:
        """The outcome so far."""
        outcome, executor = self.outcome, self.executor
        if outcome.skipped < self._warm_up:
            self._count_from_here()
        stats = self.scheduler.stats()
        since, prefilling, decoding, stalled = self._marks
        outcome.ended = self.now - since
        outcome.prefilling = executor.prefilling - prefilling
        outcome.decoding = executor.decoding - decoding
        outcome.stalled = executor.stalled - stalled
        outcome.counters = stats.counters
        outcome.prefetch_window, outcome.eviction_window = stats.prefetch_window, stats.eviction_window
        outcome.bytes_moved = self.bytes_moved()
        return outcome

    def bytes_moved(self) -> dict[str, int]:
        """Return what each link has carried since the warm-up."""
        return {name: size - self._bytes_before.get(name, 0) for name, size in self._carried().items()}

    def _carried(self) -> dict[str, int]:
        executor = self.executor
        return {
            "disk to host": executor.disk_in.bytes,
            "host to disk": executor.disk_out.bytes,
            "host to device": executor.host_out.bytes,
            "device to host": executor.host_in.bytes,
        }


def summary(outcome: Outcome) -> dict[str, Any]:
    """The figures that people ask for; rates of tokens unless they say otherwise."""
    turns = max(outcome.turns, 1)
    cached = sum(outcome.device) + sum(outcome.host) + sum(outcome.disk)
    later = [i for i in range(outcome.turns) if outcome.history[i]]
    hits = sum(1 for i in later if outcome.device[i] + outcome.host[i] + outcome.disk[i] > 0)
    reused = sum(min(outcome.history[i], outcome.device[i] + outcome.host[i] + outcome.disk[i]) for i in later)
    history = sum(outcome.history)
    computing = outcome.prefilling + outcome.decoding
    return {
        "turns": outcome.turns,
        "refused": outcome.refused,
        "cut_turns": outcome.cut_turns,
        "cut_tokens": outcome.cut_tokens,
        "cut_of_prompts": outcome.cut_tokens / (outcome.prompt_tokens + outcome.cut_tokens)
        if outcome.cut_tokens
        else 0.0,
        "hit_rate": reused / history if history else 0.0,
        "turn_hit_rate": hits / len(later) if later else 0.0,
        "from_device": sum(outcome.device) / cached if cached else 0.0,
        "from_host": sum(outcome.host) / cached if cached else 0.0,
        "from_disk": sum(outcome.disk) / cached if cached else 0.0,
        "cached_of_prompts": cached / outcome.prompt_tokens if outcome.prompt_tokens else 0.0,
        "ttft_mean": sum(outcome.ttft) / turns,
        "ttft_p50": quantile(outcome.ttft, 0.5),
        "ttft_p99": quantile(outcome.ttft, 0.99),
        "service_mean": (sum(outcome.ttft) - sum(outcome.waited)) / turns,
        "prefill_throughput": outcome.prompt_tokens / outcome.prefilling if outcome.prefilling else 0.0,
        "device_seconds": computing,
        "prefill_seconds": outcome.prefilling,
        "decode_seconds": outcome.decoding,
        "stalled_seconds": outcome.stalled,
        "simulated_seconds": outcome.ended,
        "mean_queue": outcome.queue_seconds / outcome.ended if outcome.ended else 0.0,
        "prefetch_window": outcome.prefetch_window,
        "eviction_window": outcome.eviction_window,
        "bytes_moved": dict(outcome.bytes_moved),
        "events": outcome.events,
        "steps": outcome.steps,
    }


def quantile(values: array[float], part: float) -> float:
    """The smallest value that at least `part` of all do not exceed."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, ceil(part * len(ordered)) - 1)]


REPEATS = 4096  # uneventful steps that are advanced together, at most


@dataclass(slots=True)
class Replayed:
    """What a journal led to. `different`: the first step that was not the engine's, whose digest was `recorded`; None:
    all were."""

    steps: int = 0
    moves: int = 0
    different: Step | None = None
    recorded: str = ""


def replay_journal(lines: Iterable[str], limit: int = REPEATS) -> Replayed:
    """Replay a journal (`--journal`) with as many decode steps at once as the simulator would take, and compare every
    step, repeated ones expanded, with what the engine has recorded. Raises: ValueError, which names the line or the step."""
    found = Replayed()
    steps = replay_repeated(lines, limit)
    while True:
        try:
            step, recorded = next(steps)
        except StopIteration:
            return found
        except (KeyError, TypeError, AttributeError, LookupError, AssertionError, OverflowError) as error:
            # A line that is JSON, but not what an engine writes; the plan does not check its inputs twice.
            raise ValueError(
                f"after {found.steps} steps the journal has a line that no engine wrote "
                f"({type(error).__name__}: {error})"
            ) from error
        found.steps += 1
        found.moves += len(step.moves)
        if step_digest(step) != recorded:
            found.different, found.recorded = step, recorded
            return found
