"""The scheduler: jobs in, steps out, results in, events out. The one place where all of the plan comes together.

    submit / cancel / restore / reset / flush      something is wanted
    step = schedule(now)                           what to move and what to compute
    events = commit(step, result, done, now)       what was computed and moved, what the callers are to be told
    events = complete(done, now)                   moves ended while nothing was computed

First come, first served; continuous batching; prompts in pieces beside running decodes. It knows no clock, no
thread, no tensor: the same inputs give the same steps, on an engine and in a simulator (see `journal`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Literal

from afterglow.plan.admission import Admission, Source
from afterglow.plan.batch import Batch
from afterglow.plan.compaction import Compaction
from afterglow.plan.cost import Cost, Work
from afterglow.plan.device import Device
from afterglow.plan.drafts import Drafts
from afterglow.plan.extent import Capacity, Extent
from afterglow.plan.ghosts import Ghosts
from afterglow.plan.index import Index
from afterglow.plan.jobs import Job, JobQueue, Wait, refuse_impossible
from afterglow.plan.lookahead import LookAhead
from afterglow.plan.placement import Placement
from afterglow.plan.policy import POLICIES
from afterglow.plan.restore import adopt, prefix_of, restore
from afterglow.plan.sessions import Sessions, SessionState
from afterglow.plan.shares import Sharer, shares
from afterglow.plan.stats import Counters, Stats
from afterglow.plan.step import (
    Admit,
    Admitted,
    Completion,
    Emitted,
    Event,
    ExtentId,
    ExtentRecord,
    Gather,
    JobSpec,
    MoveDone,
    Run,
    Save,
    Share,
    Step,
    StepResult,
)
from afterglow.plan.truncation import Cut, Epochs, Rules, TruncationPolicy, cut, is_private, outgrown, tenant_of

IDLE_PREFILL = 2048  # prompt tokens of a step that keeps no decode waiting
LOOK_AHEAD = 64  # waiting jobs that are tried in one step
_TOKEN = struct.Struct("<I")

WritePolicy = Literal["write_back", "write_through", "write_through_selective"]
Preload = Literal["layerwise", "whole"]  # may a job join while its layers are on their way?


class Scheduler:
    """One engine's plan. Every job number is used once."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        policy: str = "lru",
        write_policy: WritePolicy = "write_back",
        prefill_chunk: int = 256,
        max_batch: int = 24,
        max_model_len: int = 2**31,
        digest: str = "",
        source: Source = "auto",
        preload: Preload = "layerwise",
        read_buffer: int | None = None,
        relative_positions: bool = True,
        truncation_ratio: float = 0.5,
        truncation_policy: TruncationPolicy = "oldest",
        tenant_quota: int | None = None,
        warm_start: bool = False,
        ttl: float | None = None,
        retain: bool = True,
        relay: bool = False,
    ) -> None:
        """`retain`: do contexts of jobs that have ended stay on the device while there is room? `relay`: say what the jobs
        of a step have in common. `ttl`: of what a restart finds on disk, unless a conversation with a name says more
        (jobs bring theirs)."""
        self.capacity = capacity
        self.prefill_chunk = prefill_chunk
        self.max_batch = max_batch
        self.max_model_len = max_model_len
        self.preload = preload
        self._counters = Counters()
        self._index = Index()
        self._device = Device(capacity, self._counters)
        self._cost = Cost(capacity.layers, capacity.readers)
        self._ghosts = Ghosts()
        selective = write_policy == "write_through_selective" and capacity.disk_bytes > 0
        self._placement = Placement(
            capacity,
            POLICIES[policy],
            self._index,
            self._device,
            self._counters,
            self._cost,
            self._ghosts,
            selective,
            tenant_quota,
        )
        self._placement.read_buffer = read_buffer
        self._sessions = Sessions(self._index, self._placement)
        write_through = write_policy == "write_through" and capacity.disk_bytes > 0
        self._drafts = Drafts(
            capacity, self._index, self._placement, self._device, self._counters, digest, write_through
        )
        self._batch = Batch(capacity, self._index, self._device, self._drafts, self._sessions)
        self._compaction = Compaction(capacity, self._index, self._placement, digest, self._drafts.next_serial)
        self._epochs = Epochs()
        self.relative = relative_positions
        self.rules = Rules(min(max_model_len, self._device.budget), truncation_ratio, truncation_policy)
        self._write_through = write_through
        self._warm_start = warm_start
        self._ttl = ttl
        self._retain = retain
        self._relay = relay
        self._sharers: list[int | tuple[int, int]] = []  # of which batch `_shares` is known
        self._shares: tuple[Share, ...] = ()
        self._restored = False  # since the last step
        self._admission = Admission(
            capacity,
            self._index,
            self._placement,
            self._device,
            self._counters,
            self._cost,
            self._compaction,
            self._ghosts,
            self._batch.promising,
            source,
            preload == "whole",
        )
        self._jobs: dict[int, Job] = {}  # not yet finished
        self._queue = JobQueue()
        looks_ahead = POLICIES[policy].looks_ahead
        self._ahead = LookAhead(
            capacity, self._index, self._placement, self._queue, looks_ahead, min(max_model_len, self._device.budget)
        )
        self._events: list[Event] = []
        self._open: Step | None = None  # handed out, not yet committed
        self._opened = 0.0
        self._flushing = self._flush_done = False
        self._version = 0  # changes whenever an attempt to admit may end differently
        self._arrivals = 0
        self._wake = inf  # when to look again if nothing happens
        self._steps = 0
        self._restless = False  # may the next step be another one, although nothing happens before?

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
        if spec.job in self._jobs:
            raise ValueError(f"job {spec.job} exists")
        self._arrivals += 1
        self._counters.submitted += 1
        job = self._jobs[spec.job] = Job(spec, self._arrivals, self._steps, bytearray(spec.prompt))
        if found is not None:
            job.dropped, job.origin = found.dropped, found.origin
            self._counters.truncations += 1
            unscored = self.rules.policy == "importance" and found.reason == "sinks_and_recent"
            self._counters.truncations_unscored += unscored
        self._line_up(job)
        self._version += 1
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
        self._finish(found, None, "cancelled", now)
        return self._take_events()

    def restore(self, records: Sequence[ExtentRecord], now: float) -> list[ExtentRecord]:
        """Take over what the catalog says is on disk, in any order. Returns those of no use, to be deleted."""
        if not self.capacity.disk_bytes:
            return []
        self._restored = True
        return restore(records, self._index, self._placement, self._drafts, now, self._ttl)

    def adopt(self, salt: str, tokens: bytes, path: Sequence[Extent], ttl: float | None, now: float) -> list[Extent]:
        """Take over those of `path`, another engine's extents of `tokens`, whose rows are not there, as if they were on
        the disk; at any time. Returns its own."""
        taken = adopt(salt, tokens, path, self._index, self._placement, self._drafts, now, ttl)
        if taken:
            self._restored = True
            self._version += 1
        return taken

    def prefix_of(self, record: ExtentRecord) -> bytes | None:
        """The tokens before an extent of its own; None, if what it hangs below is gone."""
        return prefix_of(record, self._index)

    def reset(self, now: float, tenant: str | None = None) -> None:
        """Forget every cached row that nobody is using, in all tiers, of one tenant (by salt) or of all; the moves come
        with the next step."""
        for context in list(self._device.contexts.values()):
            if tenant in (None, tenant_of(context.salt)):
                self._device.free(context)
        self._batch.forget_tails(tenant)
        self._sessions.forget_tenant(tenant)
        self._placement.forget_all(tenant)
        self._epochs.forget_tenant(tenant)
        self._version += 1

    def baseline(self, preload: Preload, read_buffer: int | None, source: Source) -> None:
        """Change how jobs come to their rows, between jobs (A21)."""
        self._admission.source = source
        self.preload, self._placement.read_buffer = preload, read_buffer
        self._admission.whole = preload == "whole"
        self._version += 1

    def drop_contexts(self) -> None:
        """Free every retained device context that no step is copying from; the next step says so."""
        for context in list(self._device.contexts.values()):
            self._device.free(context)
        self._version += 1

    def drop_clean_host(self) -> None:
        """Give back the host slots of every idle extent that is also on disk."""
        self._flushing = False
        self._placement.drop_clean()
        self._version += 1

    def flush(self, now: float) -> None:
        """From now on, let each step write to disk what is only in host, until `flushed`. For shutting down."""
        self._flushing = True

    @property
    def flushed(self) -> bool:
        """After `flush`, and a step: is all that can be saved on disk, and no move under way?"""
        return self._flush_done and not (self._placement.in_flight or len(self._drafts) or len(self._compaction))

    @property
    def unfinished(self) -> int:
        """Jobs that wait or run."""
        return len(self._jobs)

    @property
    def queued(self) -> int:
        """Jobs that wait."""
        return len(self._queue)

    def take_notes(self) -> list[tuple[str, str, str | None]]:
        """(kind, key, value) of what is to be remembered over restarts besides extents; None: no more."""
        epochs = [("epoch", key, value) for key, value in self._epochs.take_notes()]
        return epochs + [("session", key, value) for key, value in self._sessions.take_notes()]

    def recall(self, notes: Mapping[str, dict[str, str]]) -> None:
        """Take over what `take_notes` has said before a restart: key to value, by kind. After `restore`."""
        self._epochs.recall(notes.get("epoch", {}))
        self._sessions.recall(notes.get("session", {}))

    def sessions(self, tenant: str) -> list[SessionState]:
        """One tenant's conversations that have a name, the last used first."""
        return self._sessions.listing(tenant)

    def pin_session(self, tenant: str, name: str, pinned: bool) -> bool:
        """Keep a conversation in some tier whatever happens, or no longer. False: there is none of that name."""
        return self._sessions.pin(tenant, name, pinned)

    def forget_session(self, tenant: str, name: str) -> bool:
        """Remove a conversation and what only it has used from all tiers; what its turns still use, when they end.
        False: there is none of that name."""
        if not self._sessions.forget(tenant, name):
            return False
        self._batch.disown(tenant, name, self._jobs.values())
        self._version += 1
        return True

    def take_touched(self) -> list[tuple[ExtentId, float, int]]:
        """(id, last used, hits) of extents on disk that were used since the last call, for the catalog."""
        return self._placement.take_touched()

    # --------------------------------------------------------------------------------------------- steps

    def schedule(self, now: float, repeat_limit: int = 1) -> Step:
        """The next step. The one before must have been committed if it had runs. `repeat_limit`: the most for
        `Step.repeat`; whoever carries it out repeatedly says in the result how often (a simulator; an engine does not)."""
        assert self._open is None or not self._open.runs, "the step before has not been committed"
        self._steps += 1
        restored, self._restored = self._restored, False
        if restored:
            self._placement.shrink()  # not before pins are known again
        self._placement.sweep(now, self._ahead.awaited)
        if restored and self._warm_start:
            self._placement.warm_up()
        self._wake = self._placement.next_expiry
        self._restless, evicted = False, self._counters.evicted
        self._ahead.watch()
        if self.prefill_chunk:
            runs = self._decodes(now)
            runs += self._prefills(now, self.prefill_chunk if runs else max(self.prefill_chunk, IDLE_PREFILL))
        else:  # as in the papers: a prefill keeps the decodes waiting
            runs = self._prefills(now, IDLE_PREFILL) or self._decodes(now)
        if self._flushing:
            self._flush_done = self._placement.flush(now)
        else:
            expected = self._batch.expected_slots() + self._ahead.coming(2)
            self._ahead.prefetch(now, expected)
            self._placement.background(now, expected, self._ahead.fetched)
            self._wake = min(self._wake, self._placement.chores_at)
            if not self._jobs:
                self._placement.warm(now)
        self._placement.open_gates(all_of_them=self._flushing)
        self._restless = self._restless or self._counters.evicted != evicted  # then perhaps more can go next time
        repeats = self._repeats(runs, repeat_limit) if repeat_limit > 1 else 1
        step = Step(
            self._steps,
            tuple(self._batch.releases),
            tuple(self._device.frees),
            tuple(self._placement.take_moves()),
            tuple(self._placement.take_urged()),
            tuple(runs),
            self._wake if self._wake < inf else None,
            repeats,
            self._shared(runs) if self._relay else (),
        )
        self._batch.releases, self._device.frees = [], []
        self._open, self._opened = step, now
        return step

    def _shared(self, runs: list[Run]) -> tuple[Share, ...]:
        """What the step's jobs have in common, looked for when they are others, or one of them has a longer prefix."""
        sharers: list[int | tuple[int, int]] = [
            run.job if len(run.tokens) == 1 and run.admit is None else (run.job, run.start) for run in runs
        ]
        if sharers != self._sharers:
            self._sharers = sharers
            jobs = [self._jobs[run.job] for run in runs]
            self._shares = shares(
                [
                    Sharer(job.spec.job, job.spec.salt, job.tokens, run.start)
                    for job, run in zip(jobs, runs, strict=True)
                ]
            )
        return self._shares

    def _repeats(self, runs: list[Run], limit: int) -> int:
        """How often a step with these runs may be carried out: until a job ends, or needs something new."""
        moved = self._placement.has_moves or self._batch.releases or self._device.frees
        if self._restless or self._flushing or moved or not runs:
            return 1
        for run in runs:
            job = self._jobs[run.job]
            spec = job.spec
            if job.state != "decoding" or spec.stop_tokens or (job.saving and not run.saves):
                return 1
            length = len(job.tokens) // 4
            most = min(spec.max_tokens - job.generated, job.capacity - job.rows, self.max_model_len - length)
            if run.saves:
                most = min(most, 1 + self._drafts.room(job))
            if most < limit:
                limit = most
        return max(limit, 1)

    def commit(self, step: Step, result: StepResult, done: Iterable[Completion], now: float) -> list[Event]:
        """Take in what a step has computed, then what has been moved and saved meanwhile."""
        self._commit(step, result, now)
        self._complete(done, now)
        return self._take_events()

    def complete(self, done: Iterable[Completion], now: float) -> list[Event]:
        """Take in completions alone."""
        self._complete(done, now)
        return self._take_events()

    def _commit(self, step: Step, result: StepResult, now: float) -> None:
        assert step is self._open, "not the step that was handed out"
        self._open = None
        self._measure(step, result, now)
        if self._device.unpin():
            self._version += 1
        self._steps += result.repeats - 1
        share = self._committed if result.repeats == 1 else self._repeated
        for run in step.runs:
            share(run, result, now)

    def _measure(self, step: Step, result: StepResult, now: float) -> None:
        """Learn what computing takes from passes with a prefill in them that had nothing to wait for."""
        waited = any(gather.move is not None for run in step.runs for gather in run.gathers)
        if waited or result.failed or all(len(run.tokens) == 1 for run in step.runs):
            return
        work = Work()
        for run in step.runs:
            work.add(len(run.tokens), run.start, sum(gather.stop - gather.start for gather in run.gathers))
        self._cost.passed(work, now - self._opened)

    def _complete(self, done: Iterable[Completion], now: float) -> None:
        for item in done:
            self._version += 1
            self._flush_done = False
            if isinstance(item, MoveDone) and self._compaction.ended(item, self._write_through, now):
                continue
            if isinstance(item, MoveDone):
                self._placement.complete(item, now)
            elif (job := self._drafts.saved(item, now)) is not None:
                self._batch.settle(job, now)

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------------------------- what a step consists of

    def _decodes(self, now: float) -> list[Run]:
        for job in list(self._batch.running):
            if job.state == "decoding" and job.rows + 1 > job.capacity:
                self._grow(job, now)
        return [self._decode(job, now) for job in self._batch.running if job.state == "decoding"]

    def _decode(self, job: Job, now: float) -> Run:
        row = job.rows
        saves: tuple[Save, ...] = ()
        if job.saving and row >= job.covered:
            saves = self._drafts.tee_one(job, row, now)
        return Run(job.spec.job, row, _TOKEN.unpack_from(job.tokens, 4 * row), True, job.capacity, None, (), saves)

    def _prefills(self, now: float, budget: int) -> list[Run]:
        """Prompt tokens: first of jobs that are at it, then of jobs that join."""
        runs: list[Run] = []
        decoding = any(job.state == "decoding" for job in self._batch.running)
        for job in self._batch.running:
            if job.state == "prefilling" and budget > 0:
                next_stage = job.stages[0] if job.stages and job.rows == job.stop else None
                alone = not decoding and self.preload == "layerwise"
                if not alone and next_stage is not None and not self._admission.may_begin(job, next_stage, now):
                    self._restless = True
                    continue  # the others need not wait for its rows
                stop = min(job.length, job.rows + budget)
                if not self._admission.may_save(job, max(job.rows, job.covered), stop, now):
                    self._wake = min(self._wake, self._admission.deadline(job, job.rows, stop))
                    self._restless = True
                    continue
                job.held_since = None
                runs.append(self._run(job, budget, None, now))
                budget -= len(runs[-1].tokens)
        if len(self._batch.running) >= self.max_batch:
            return runs
        waiting = self._their_turn()
        seats = self.max_batch - len(self._batch.running) - sum(job.state == "loading" for job in waiting)
        for job in waiting:
            taken = job.state == "loading"
            if len(self._batch.running) >= self.max_batch:
                break
            if seats <= 0 and not taken:
                continue
            outcome = self._try(job, budget > 0, now)
            seats += taken - (isinstance(outcome, Admit) or outcome is Wait.LOADS)
            if isinstance(outcome, Admit):
                runs.append(self._run(job, budget, outcome, now))
                budget -= len(runs[-1].tokens)
            elif outcome in (Wait.DEVICE, Wait.SLOTS, Wait.SAVES, Wait.TURN):
                break  # first come, first served: nobody slips past for want of room
        return runs

    def _their_turn(self) -> list[Job]:
        """The first in the queue, without those whose conversation has another turn that runs or came earlier (A1)."""
        busy = {job.conversation for job in self._batch.running} - {None}
        turns = (job for job in self._queue if job.conversation not in busy and self._queue.is_next_turn(job))
        return list(islice(turns, LOOK_AHEAD))

    def _try(self, job: Job, may_join: bool, now: float) -> Admit | Wait:
        """Attempt to admit a job, unless nothing has changed since the last time."""
        idle = not self._batch.running and self.preload == "layerwise"
        if job.tried == self._version and job.verdict is not None and not idle:
            return job.verdict
        outcome: Admit | Wait
        if self._compaction.is_promised(job, self._batch.promising()):
            self._counters.waits_prefix += not job.waited
            job.waited, outcome = True, Wait.PREFIX
        else:
            outcome = self._admission.attempt(job, now, idle, may_join)
        if isinstance(outcome, Admit):
            self._leave_queue(job)
            self._batch.running.append(job)
            return outcome
        job.state = "loading" if outcome is Wait.LOADS else "waiting"
        # A turn comes with the budget of the next step, rows come with time: of both the version knows nothing.
        lasting = outcome not in (Wait.TURN, Wait.LOADS, Wait.SAVES)
        self._restless = self._restless or not lasting
        if outcome is Wait.SAVES:
            self._wake = min(self._wake, self._admission.deadline(job, 0, job.length))
        job.tried, job.verdict = (self._version, outcome) if lasting else (-1, None)
        return outcome

    def _run(self, job: Job, budget: int, admit: Admit | None, now: float) -> Run:
        start = job.rows
        gathers: tuple[Gather, ...] = ()
        if job.stages and (admit is not None or job.rows == job.stop):
            stage = job.stages.pop(0)
            start, gathers, job.stop = stage.start, stage.gathers, stage.stop
        rest = (job.stop if job.stop is not None else job.length) - start
        rows = min(rest, budget) if self.prefill_chunk else rest
        tokens = struct.unpack_from(f"<{rows}I", job.tokens, 4 * start)
        sample = start + rows == job.length and job.remaining > 0
        new = max(start, job.covered)  # rows before it are cached already, and are only computed again
        saves = self._drafts.tee(job, new, start + rows - new, now) if job.saving and start + rows > new else ()
        return Run(job.spec.job, start, tokens, sample, job.capacity, admit, gathers, saves)

    # ----------------------------------------------------------------------------------------- on the device

    def _grow(self, job: Job, now: float) -> None:
        """More room for a decoding job, at the cost of retained contexts, then of the job that came last."""
        while job.running and not self._batch.extend(job):
            victim = max(self._batch.running, key=lambda other: other.key)
            if len(self._batch.running) == 1 or job.rows >= self._device.budget:
                self._finish(job, None, "length", now)
            else:
                # It may be this very job: were it to push out an older one, they could do so in turns for ever.
                self._counters.preemptions += 1
                self._send_back(victim, now)

    def _committed(self, run: Run, result: StepResult, now: float) -> None:
        job = self._jobs[run.job]
        if run.job in result.failed:
            self._failed(job, result.failed[run.job], now)
            return
        if not job.stages:
            if job.pins:
                self._admission.unpin(job)
            if not job.admitted:
                self._tell_admitted(job)
        job.rows = run.start + len(run.tokens)
        if job.spec.write:
            new = job.rows - max(run.start, job.covered)
            self._counters.rows_unsaved += max(0, new) - sum(save.rows for save in run.saves)
            self._drafts.commit(job, now)
            if not job.drafts:
                self._batch.settle(job, now)
        if job.cancelled:
            self._finish(job, None, "cancelled", now)
        elif run.sample:
            self._sampled(job, result.tokens[run.job], now)
        elif job.rows == job.length:
            self._finish(job, None, "length", now)

    def _repeated(self, run: Run, result: StepResult, now: float) -> None:
        """A decoding job's share of a step that was carried out more than once: nothing ended before the last time."""
        job = self._jobs[run.job]
        times, drawn = result.repeats, result.drawn[run.job]
        job.rows = run.start + times
        if run.saves:
            self._drafts.repeated(job, times, now)
        elif job.spec.write:
            self._counters.rows_unsaved += times
        job.tokens += drawn
        job.generated += times
        if job.cancelled:
            self._finish(job, None, "cancelled", now)
        elif job.generated == job.spec.max_tokens or len(job.tokens) // 4 >= self.max_model_len:
            self._finish(job, int.from_bytes(drawn[-4:], "little"), "length", now)

    def _tell_admitted(self, job: Job) -> None:
        # Only now, because a load that fails would make a liar of whoever tells earlier; and only once.
        job.admitted = True
        embedded = is_private(job.spec.salt) and any(job.hits)
        self._events.append(Admitted(job.spec.job, *job.hits, job.dropped, embedded))
        self._counters.count_hits(job.target, *job.hits)
        self._counters.count_miss(*job.missed)

    def _sampled(self, job: Job, token: int, now: float) -> None:
        job.tokens += token.to_bytes(4, "little")
        job.generated += 1
        if job.state == "prefilling":
            job.state = "decoding"
            self._version += 1
        if token in job.spec.stop_tokens:
            self._finish(job, token, "stop", now)
        elif job.remaining == 0 or job.length >= self.max_model_len:
            self._finish(job, token, "length", now)
        else:
            self._events.append(Emitted(job.spec.job, token, None))

    def _failed(self, job: Job, extent: ExtentId, now: float) -> None:
        """An extent did not arrive: the next attempt does not wait for it again."""
        self._counters.failed_loads += 1
        missing = self._index.extents.get(extent)
        if missing is not None:
            self._placement.avoid(missing, now)
        if job.cancelled:
            self._finish(job, None, "cancelled", now, retain=False)
        else:
            self._send_back(job, now)

    def _send_back(self, job: Job, now: float) -> None:
        """Off the device and into the queue, with what has been generated as part of the prompt."""
        self._depart(job, now, retain=False)
        job.state, job.tried = "waiting", -1
        self._line_up(job)
        self._batch.settle(job, now)

    def _finish(
        self,
        job: Job,
        token: int | None,
        why: Literal["stop", "length", "cancelled"],
        now: float,
        retain: bool = True,
    ) -> None:
        if job.running:
            self._ahead.finished(self._batch.path_rows(job))
            self._depart(job, now, retain and self._retain)
        else:
            self._leave_queue(job)
            self._admission.unpin(job)
        job.state = "gone"
        del self._jobs[job.spec.job]
        if why == "cancelled":
            self._counters.cancelled += 1
        else:
            self._counters.finished += 1
        self._events.append(Emitted(job.spec.job, token, why))
        self._version += 1
        self._batch.settle(job, now)

    def _line_up(self, job: Job) -> None:
        self._queue.add(job)
        self._ahead.joined(job)

    def _leave_queue(self, job: Job) -> None:
        self._queue.remove(job)
        self._ahead.left(job)

    def _depart(self, job: Job, now: float, retain: bool) -> None:
        self._version += 1
        self._batch.depart(job, self._admission, now, retain)

    # ------------------------------------------------------------------------------------------- looking on

    def stats(self) -> Stats:
        """Numbers for metrics."""
        loading = sum(job.state == "loading" for job in self._queue)
        return Stats(
            prefetch_window=self._ahead.prefetch_window,
            eviction_window=self._ahead.eviction_window,
            read_rate=self._cost.read_rate,
            prefill_rate=self._cost.prefill_rate,
            sessions=len(self._sessions),
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
            moves_in_flight=self._placement.in_flight + len(self._compaction),
            saves_in_flight=len(self._drafts),
            counters=replace(self._counters),
        )

    def check(self) -> None:
        """Everything that must hold between calls, at the cost of looking at everything. For tests."""
        self._index.check()
        self._placement.check(self._drafts.slots() + self._compaction.slots(), self._restored)
        self._drafts.check()
        self._batch.check(list(self._queue), self._compaction.pins())
        self._ahead.check()
        jobs = [*self._queue, *self._batch.running]
        assert sorted(job.spec.job for job in jobs) == sorted(self._jobs)
        assert len(self._batch.running) <= self.max_batch
