"""The scheduler: jobs in, steps out, results in, events out.

    submit / cancel / restore / reset / flush      requests to the plan
    step = schedule(now)                           what to move and what to compute
    events = commit(step, result, done, now)       the results and ended moves; returns events for callers
    events = complete(done, now)                   moves ended while nothing was computed

It has a cache (rows in all tiers), a queue and a batch of jobs, and a composer that makes steps. First come,
first served; continuous batching; prompts in pieces beside running decodes. It knows no clock, no thread, no tensor: the
same inputs give the same steps, on an engine and in a simulator (see `journal`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from afterglow.choices import KVSource, Preload, ReadBuffer
from afterglow.plan.batching.admission import Admission
from afterglow.plan.batching.batch import Batch
from afterglow.plan.batching.commit import Committer, most_repeats
from afterglow.plan.batching.compaction import Compaction
from afterglow.plan.batching.compose import StepComposer
from afterglow.plan.batching.drafts import Drafts
from afterglow.plan.batching.job import refuse_impossible
from afterglow.plan.batching.merging import Merging
from afterglow.plan.batching.queue import RequestQueue
from afterglow.plan.batching.read_ahead import ReadAhead
from afterglow.plan.batching.step_ahead import StepAhead
from afterglow.plan.cache import Cache
from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.truncation import Cut
from afterglow.plan.stats import Stats
from afterglow.plan.step import (
    Event,
    ExtentRecord,
    JobSpec,
    Lost,
    MoveDone,
    Run,
    Step,
    StepResult,
    TransferDone,
)
from afterglow.request import ContextWindow

NO_GUESSES: Mapping[int, Sequence[int]] = {}


class Scheduler:
    """One engine's plan. Every job number is used once."""

    def __init__(self, capacity: Capacity, options: SchedulerOptions | None = None) -> None:
        options = options or SchedulerOptions()
        self.capacity = capacity
        self.max_model_len = options.max_model_len
        self.cache = cache = Cache(capacity, options)
        self._drafts = Drafts(cache)
        self._merging = Merging(cache, options.small_rows)
        self._compaction = Compaction(cache)
        self._batch = batch = Batch(cache, self._drafts, self._merging)
        self._queue = queue = RequestQueue(cache, batch, options)
        self._ahead = queue.ahead
        self._admission = Admission(cache, batch, self._compaction, options)
        self._composer = StepComposer(cache, queue, batch, self._admission, options)
        self._read_ahead = ReadAhead(cache, queue, self._admission)
        self.outlook = self._composer.outlook
        self._committer = Committer(cache, queue, batch)
        self._relay = options.relay
        self._step_ahead = StepAhead(options.step_ahead, queue.jobs)
        self._max_batch = options.max_batch
        self._open: Step | None = None  # handed out, not yet committed
        self._opened = 0.0
        self._steps = 0
        self._flushing = self._flush_done = False

    # --------------------------------------------------------------------------------------------- jobs

    def knows(self, salt: str, tokens: bytes) -> bool:
        """Are some rows of a context cached, or being saved?"""
        return self._compaction.knows(*self.cache.current(salt, tokens), self._batch.promising())

    def submit(self, spec: JobSpec, now: float) -> Cut | None:
        """Queue a job. Returns how its prompt was cut, if it was.

        Raises:
            RequestError: it could never run.
        """
        spec, found = self.cache.truncate(spec)
        refuse_impossible(spec, ContextWindow(self.max_model_len), self.cache.device.most)
        unscored = found is not None and self.cache.rules.policy == "importance" and found.reason == "sinks_and_recent"
        self._queue.arrive(spec, self._steps, found, unscored)
        return found

    def cancel(self, job: int, now: float) -> list[Event]:
        """End a job at whatever state it is in (nothing, if it is unknown or has ended).

        Its event is returned; or, if a step that it runs in is under way, comes with that step's commit.
        """
        found = self._queue.jobs.get(job)
        if found is None:
            return []
        if self._open is not None and any(run.job == job for run in self._open.runs):
            found.cancelled = True
            return []
        self._queue.finish(found, None, "cancelled", now)
        return self._queue.take_events()

    # ------------------------------------------------------------------------------------- the cache

    def restore(self, records: Sequence[ExtentRecord], now: float) -> list[ExtentRecord]:
        """Take over the catalog's records, in any order. Returns those of no use, to be deleted."""
        return self.cache.restore(records, now)

    def adopt(self, salt: str, tokens: bytes, path: Sequence[Extent], ttl: float | None, now: float) -> list[Extent]:
        """Take over the extents of `path`, another engine's for `tokens`, whose rows are missing here, as if they were on
        disk. Returns the extents made."""
        taken = self.cache.adopt(salt, tokens, path, ttl, now)
        self._queue.version += bool(taken)
        return taken

    def recall(self, notes: Mapping[str, dict[str, str]]) -> None:
        """Take over the notes of before a restart: key to value, by kind. After `restore`."""
        self.cache.recall(notes)

    def reset(self, now: float, whose: str | None = None) -> None:
        """Forget every cached row that no job uses, in all tiers, and the prefixes that tenants have registered: of one
        salt, of one tenant (see `salts.covers`) or of all; the moves come with the next step. The operator's prefixes
        stay."""
        self._batch.forget_tails(whose)
        self._merging.cancel()
        self.cache.reset(whose)
        self._queue.version += 1

    def pin_session(self, tenant: str, name: str, pinned: bool) -> bool:
        """Keep a conversation in some tier whatever happens, or no longer. False: there is none of that name."""
        return self.cache.sessions.pin(tenant, name, pinned)

    def forget_session(self, tenant: str, name: str) -> bool:
        """Remove a conversation and the extents that only it has used from all tiers; extents that its turns still use,
        when they end. False: there is none of that name."""
        disowned = self._batch.disown(tenant, name, self._queue.jobs.values())
        if self.cache.sessions.is_pinned(tenant, name) is None:  # its first turn has not ended, if there is one
            return disowned
        self._merging.cancel()
        self.cache.sessions.forget(tenant, name)
        self._queue.version += 1
        return True

    def register_prefix(self, salt: str, name: str, tokens: bytes, about: str, now: float) -> None:
        """Keep the rows of these tokens from now on, as soon as some job has computed them, for all jobs of a tenant
        whose prompts begin so; under salt `OPERATOR` of all tenants. `about`: a text to be remembered with them.

        Raises:
            RequestError: there are too many.
        """
        self.cache.registered.register(salt, name, tokens, about, now)
        self._queue.version += 1

    def forget_prefix(self, salt: str, name: str) -> bool:
        """Keep a registered prefix no longer than other rows. False: there is none of that name."""
        self._queue.version += 1
        return self.cache.registered.forget(salt, name)

    def baseline(self, preload: Preload, read_buffer: ReadBuffer, source: KVSource) -> None:
        """Change how jobs come to their rows, between jobs (a measurement's baseline)."""
        self._admission.decision.source = source
        self._admission.decision.whole, self._composer.layerwise = preload == "whole", preload == "layerwise"
        self.cache.loading.read_buffer = read_buffer
        self._queue.version += 1

    def drop_contexts(self) -> None:
        """Free every retained device context that no step is copying from; the next step says so."""
        self.cache.drop_contexts()
        self._queue.version += 1

    def drop_clean_host(self) -> None:
        """Give back the host slots of every idle extent that is also on disk."""
        self._flushing = False
        self.cache.placement.drop_clean()
        self._queue.version += 1

    def flush(self, now: float) -> None:
        """From now on, let each step write extents that are only in host to disk, until `flushed`. For shutting down."""
        self._flushing = True

    def give_up(self) -> Lost:
        """Forget, when the plan ends, after `flush`, extents in host only, as evicted; `take_notes` remembers that."""
        self._queue.version += 1
        return self.cache.placement.give_up()

    @property
    def flushed(self) -> bool:
        """After `flush`, and a step: is all that can be saved on disk, and no move under way?"""
        return self._flush_done and not (
            len(self.cache.moves) or len(self._drafts) or len(self._compaction) or len(self._merging)
        )

    @property
    def unfinished(self) -> int:
        """Jobs that wait or run."""
        return len(self._queue.jobs)

    @property
    def queued(self) -> int:
        """Jobs that wait."""
        return len(self._queue.waiting)

    # --------------------------------------------------------------------------------------------- steps

    def schedule(self, now: float, repeat_limit: int = 1, guesses: Mapping[int, Sequence[int]] = NO_GUESSES) -> Step:
        """Compose the next step. The one before must have been committed if it had runs. `repeat_limit`: the most for
        `Step.repeat`; a simulator, which repeats steps, says in the result how often. `guesses`: tokens that jobs that are
        decoding may draw next; as many are tried as there is room for."""
        assert self._open is None or not self._open.runs, "the step before has not been committed"
        self._steps += 1
        self.cache.tidy(now, self._ahead.awaited)
        evicted = self.cache.counters.evicted
        self._ahead.watch()
        wake = min(self.cache.placement.expiry.next, self.cache.placement.marks.next)
        runs = self._composer.compose(now, wake, guesses)
        if self._flushing:
            self._flush_done = self.cache.placement.write_back.flush(now)
        else:
            expected = self._batch.expected_slots() + self._ahead.coming(2)
            self._ahead.prefetch(now, expected)
            self.cache.placement.background(now, expected, self._ahead.fetched)
            if not self._queue.jobs:
                self.cache.placement.warm_start.go_on(now)
        self.cache.loading.open_gates(all_of_them=self._flushing)
        following = self._composer.next_in_line() if runs and self._read_ahead.enabled else None
        ahead = self._read_ahead.choose(following, now)
        wake = self._composer.wake if self._flushing else min(self._composer.wake, self.cache.placement.retry_at)
        evicting = self.cache.counters.evicted != evicted  # then perhaps more can go next time
        repeats = self._repeats(runs, repeat_limit) if repeat_limit > 1 and not evicting else 1
        goes_on, repeats = self._step_ahead.choose(runs, repeats)
        step = Step(
            self._steps,
            tuple(self._batch.releases),
            tuple(self.cache.device.frees),
            tuple(self.cache.moves.take()),
            tuple(self.cache.loading.take_promoted(now)),
            tuple(runs),
            wake if wake < inf else None,
            repeats,
            self._composer.shared(runs) if self._relay else (),
            ahead,
            goes_on,
        )
        self._batch.releases, self.cache.device.frees = [], []
        self._open, self._opened = step, now
        return step

    def _repeats(self, runs: list[Run], limit: int) -> int:
        """Return how often a step with these runs may be carried out."""
        if self.outlook.restless or self._flushing or self.cache.placement.has_moves or not runs:
            return 1
        return most_repeats(self._batch.running, limit)

    @property
    def open_step(self) -> Step | None:
        """The step that was handed out and not yet committed."""
        return self._open

    def commit(self, step: Step | None, result: StepResult, done: Iterable[TransferDone], now: float) -> list[Event]:
        """Take in the results of a step, then the moves and saves that have ended meanwhile."""
        assert step is not None, "no step was handed out"
        assert step is self._open, "not the step that was handed out"
        self._open = None
        if self.cache.device.unpin():
            self._queue.version += 1
        self._steps += result.repeats - 1
        self._committer.commit(step, result, self._opened, now)
        self._complete(done, now)
        return self._queue.take_events()

    def complete(self, done: Iterable[TransferDone], now: float) -> list[Event]:
        """Take in completions alone."""
        self._complete(done, now)
        return self._queue.take_events()

    def _complete(self, done: Iterable[TransferDone], now: float) -> None:
        for item in done:
            self._queue.version += 1
            self._flush_done = False
            if isinstance(item, MoveDone) and self._compaction.ended(item, now):
                continue
            if isinstance(item, MoveDone) and self._merging.copied(item, self._batch.promising(), now):
                continue
            if isinstance(item, MoveDone):
                self.cache.complete(item, now)
                self._merging.stored(item, self._batch.promising())
            elif (job := self._drafts.saved(item, now)) is not None:
                self._batch.settle(job, now)

    # ------------------------------------------------------------------------------------------- looking on

    def unsaved(self) -> tuple[int, float]:
        """Count the rows that running prefills have still to compute and to save, and predict the seconds that this takes after
        their first layer (0: not known yet). Changes nothing."""
        rows, seconds = 0, 0.0
        for job in self._batch.running:
            start = max(job.rows, job.covered)
            if job.state == "prefilling" and job.saving and start < job.target:
                rows += job.target - start
                seconds += self.cache.cost.compute(job.target - start, start)
        return rows, seconds * (self.capacity.layers - 1) / self.capacity.layers

    def stats(self) -> Stats:
        """Numbers for metrics. Changes nothing; the thread that owns the plan calls it, and may hand the result on."""
        loading = sum(job.state == "loading" for job in self._queue.waiting)
        return self.cache.stats(
            prefetch_window=self._ahead.prefetch_window,
            eviction_window=self._ahead.eviction_window,
            waiting=len(self._queue.waiting) - loading,
            loading=loading,
            running=len(self._batch.running),
            moves_in_flight=len(self.cache.moves) + len(self._compaction) + len(self._merging),
            saves_in_flight=len(self._drafts),
        )

    def check(self) -> None:
        """Everything that must hold between calls, at the cost of looking at everything. For tests."""
        self.cache.check(self._drafts.slots() + self._compaction.slots())
        self._drafts.check()
        pins = self._compaction.pins() + self._merging.pins() + self.cache.registered.pins()
        pins += self._read_ahead.pins
        self._batch.check(self._queue.waiting, pins)
        self._ahead.check()
        jobs = [*self._queue.waiting, *self._batch.running]
        assert sorted(job.spec.job for job in jobs) == sorted(self._queue.jobs)
        assert len(self._batch.running) <= self._max_batch
