"""The scheduler: jobs in, steps out, results in, events out. The one place where all of the plan comes together.

    submit / cancel / restore / reset / flush      something is wanted
    step = schedule(now)                           what to move and what to compute
    events = commit(step, result, done, now)       what was computed and moved, what the callers are to be told
    events = complete(done, now)                   moves ended while nothing was computed

First come, first served; continuous batching; prompts in pieces beside running decodes. It knows no clock, no
thread, no tensor: the same inputs give the same steps, on an engine and in a simulator (see `journal`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from afterglow.plan.filling import IDLE_PREFILL, LOOK_AHEAD
from afterglow.plan.jobs import refuse_impossible
from afterglow.plan.parts import Parts, Preload, WritePolicy
from afterglow.plan.stats import Stats
from afterglow.plan.step import Completion, Event, JobSpec, Lost, MoveDone, Run, Step, StepResult
from afterglow.plan.truncation import Cut, cut, outgrown

__all__ = ["IDLE_PREFILL", "LOOK_AHEAD", "Preload", "Scheduler", "WritePolicy"]


class Scheduler(Parts):
    """One engine's plan. Every job number is used once."""

    _open: Step | None = None  # handed out, not yet committed
    _opened = 0.0
    _steps = 0
    _flushing = _flush_done = False

    # ------------------------------------------------------------------------------------------- wishes

    def outgrown(self, spec: JobSpec) -> tuple[str, bytes] | None:
        """Before `submit`: the context (salt, tokens) whose rows' scores the job should bring, if any are wanted."""
        if not spec.truncation:
            return None
        return outgrown(self._epochs, self.rules, spec.salt, spec.prompt, spec.max_tokens, self.relative)

    def knows(self, salt: str, tokens: bytes) -> bool:
        """Is some of a context cached, or being saved?"""
        epoch = self._epochs.peek(salt, tokens)
        if epoch is not None:
            salt, tokens = epoch.salt, epoch.compact(tokens)
        return self._compaction.knows(salt, tokens, self._batch.promising())

    def submit(self, spec: JobSpec, now: float) -> Cut | None:
        """Queue a job. Returns how its prompt was cut, if it was. `RequestError` if it could never run."""
        found = None
        if spec.truncation:
            spec = replace(spec, turns=self._registered.kept(spec.salt, spec.prompt, spec.turns))
            found = cut(
                self._epochs,
                self.rules,
                spec.salt,
                spec.prompt,
                spec.max_tokens,
                spec.turns,
                self.relative,
                spec.discard,
                spec.scores,
            )
        if found is not None:
            spec = replace(spec, prompt=found.prompt, salt=found.salt, scores=())
        refuse_impossible(spec, self.max_model_len, self._device.budget)
        unscored = found is not None and self.rules.policy == "importance" and found.reason == "sinks_and_recent"
        self._roster.arrive(spec, self._steps, found, unscored)
        return found

    def cancel(self, job: int, now: float) -> list[Event]:
        """End a job at whatever state it is in (nothing, if it is unknown or has ended).

        Its event is returned; or, if a step that it runs in is under way, comes with that step's commit.
        """
        found = self._jobs.get(job)
        if found is None:
            return []
        if self._open is not None and any(run.job == job for run in self._open.runs):
            found.cancelled = True
            return []
        self._roster.finish(found, None, "cancelled", now)
        return self._roster.take_events()

    def drop_clean_host(self) -> None:
        """Give back the host slots of every idle extent that is also on disk."""
        self._flushing = False
        self._placement.drop_clean()
        self._roster.version += 1

    def flush(self, now: float) -> None:
        """From now on, let each step write to disk what is only in host, until `flushed`. For shutting down."""
        self._flushing = True

    def give_up(self) -> Lost:
        """When the plan ends, after `flush`: forget what is in host only, as evicted; `take_notes` remembers that."""
        self._roster.version += 1
        return self._placement.give_up()

    @property
    def flushed(self) -> bool:
        """After `flush`, and a step: is all that can be saved on disk, and no move under way?"""
        return self._flush_done and not (
            self._placement.in_flight or len(self._drafts) or len(self._compaction) or len(self._merging)
        )

    @property
    def unfinished(self) -> int:
        """Jobs that wait or run."""
        return len(self._jobs)

    @property
    def queued(self) -> int:
        """Jobs that wait."""
        return len(self._queue)

    # --------------------------------------------------------------------------------------------- steps

    def schedule(self, now: float, repeat_limit: int = 1) -> Step:
        """The next step. The one before must have been committed if it had runs. `repeat_limit`: the most for
        `Step.repeat`; whoever carries it out repeatedly says in the result how often (a simulator; an engine does not)."""
        assert self._open is None or not self._open.runs, "the step before has not been committed"
        self._steps += 1
        restored, self._restored = self._restored, False
        if restored:
            self._placement.shrink()  # not before pins are known again
        self._placement.keep_budget(now)
        self._registered.refresh(now)
        self._placement.sweep(now, self._ahead.awaited)
        self._sessions.bury()
        if restored and self._warm_start:
            self._placement.warm_up()
        evicted = self._counters.evicted
        self._ahead.watch()
        runs = self._filling.fill(now, self._placement.next_expiry)
        if self._flushing:
            self._flush_done = self._placement.flush(now)
        else:
            expected = self._batch.expected_slots() + self._ahead.coming(2)
            self._ahead.prefetch(now, expected)
            self._placement.background(now, expected, self._ahead.fetched)
            if not self._jobs:
                self._placement.warm(now)
        self._placement.open_gates(all_of_them=self._flushing)
        wake = self._filling.wake if self._flushing else min(self._filling.wake, self._placement.chores_at)
        evicting = self._counters.evicted != evicted  # then perhaps more can go next time
        repeats = self._repeats(runs, repeat_limit) if repeat_limit > 1 and not evicting else 1
        step = Step(
            self._steps,
            tuple(self._batch.releases),
            tuple(self._device.frees),
            tuple(self._placement.take_moves()),
            tuple(self._placement.take_urged()),
            tuple(runs),
            wake if wake < inf else None,
            repeats,
            self._filling.shared(runs) if self._relay else (),
            self._filling.closed,
            self._filling.awaited,
        )
        self._batch.releases, self._device.frees = [], []
        self._open, self._opened = step, now
        return step

    def _repeats(self, runs: list[Run], limit: int) -> int:
        """How often a step with these runs may be carried out."""
        if self._filling.restless or self._flushing or self._placement.has_moves or not runs:
            return 1
        return self._filling.repeats(limit)

    def commit(self, step: Step, result: StepResult, done: Iterable[Completion], now: float) -> list[Event]:
        """Take in what a step has computed, then what has been moved and saved meanwhile."""
        assert step is self._open, "not the step that was handed out"
        self._open = None
        if self._device.unpin():
            self._roster.version += 1
        self._steps += result.repeats - 1
        self._results.take_in(step, result, self._opened, now)
        self._complete(done, now)
        return self._roster.take_events()

    def complete(self, done: Iterable[Completion], now: float) -> list[Event]:
        """Take in completions alone."""
        self._complete(done, now)
        return self._roster.take_events()

    def _complete(self, done: Iterable[Completion], now: float) -> None:
        for item in done:
            self._roster.version += 1
            self._flush_done = False
            if isinstance(item, MoveDone) and self._compaction.ended(item, self._write_through, now):
                continue
            if isinstance(item, MoveDone) and self._merging.copied(item, self._batch.promising(), now):
                continue
            if isinstance(item, MoveDone):
                self._placement.complete(item, now)
                self._merging.stored(item, self._batch.promising())
            elif (job := self._drafts.saved(item, now)) is not None:
                self._batch.settle(job, now)

    # ------------------------------------------------------------------------------------------- looking on

    def stats(self) -> Stats:
        """Numbers for metrics. Changes nothing; the thread that owns the plan calls it, and may hand the result on."""
        loading = sum(job.state == "loading" for job in self._queue)
        return Stats(
            prefetch_window=self._ahead.prefetch_window,
            eviction_window=self._ahead.eviction_window,
            read_rate=self._cost.read_rate,
            prefill_rate=self._cost.prefill_rate,
            sessions=len(self._sessions),
            prefixes=len(self._registered),
            prefix_rows=self._registered.rows,
            waiting=len(self._queue) - loading,
            loading=loading,
            running=len(self._batch.running),
            extents=len(self._index.extents),
            contexts=len(self._device.contexts),
            device_rows=self._device.used,
            device_rows_total=self._device.budget,
            host_slots=self._placement.pool.total - self._placement.pool.free,
            host_slots_total=self._placement.pool.total,
            disk_bytes=self._placement.disk_used,
            disk_bytes_total=self.capacity.disk_bytes,
            disk_over_bytes=self._placement.disk_over,
            moves_in_flight=self._placement.in_flight + len(self._compaction) + len(self._merging),
            saves_in_flight=len(self._drafts),
            counters=replace(self._counters),
        )

    def check(self) -> None:
        """Everything that must hold between calls, at the cost of looking at everything. For tests."""
        self._index.check()
        self._placement.check(self._drafts.slots() + self._compaction.slots(), self._restored)
        self._drafts.check()
        self._batch.check(list(self._queue), self._compaction.pins() + self._merging.pins() + self._registered.pins())
        self._ahead.check()
        jobs = [*self._queue, *self._batch.running]
        assert sorted(job.spec.job for job in jobs) == sorted(self._jobs)
        assert len(self._batch.running) <= self._max_batch
