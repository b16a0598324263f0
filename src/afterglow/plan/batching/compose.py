"""The composition of steps: decodes, prompt tokens of jobs that are at it, and of jobs that join.

First come, first served; continuous batching; prompts in pieces beside running decodes. It knows the queue, the batch and
admission; not the results of a step.

Shares are rows that several jobs of a step have in common, whose keys and values need to be read once for all. RelayAttention
§3 knows one system prompt; here it is the tokens that running jobs begin with alike, at several levels (a system prompt, below
it a document, below that a conversation). Prompts that were cut share the tokens before the first one that was left out. Tenants
share nothing but the operator's registered prefixes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import islice
from math import inf
from typing import NamedTuple

from afterglow.plan.batching.admission import Admission
from afterglow.plan.batching.batch import Batch
from afterglow.plan.batching.commit import Outlook
from afterglow.plan.batching.job import Job, Wait
from afterglow.plan.batching.queue import RequestQueue
from afterglow.plan.cache import Cache
from afterglow.plan.options import UNLIMITED, SchedulerOptions
from afterglow.plan.prefix.salts import client_salt
from afterglow.plan.prefix.shared_prefixes import SharedPrefix
from afterglow.plan.prefix.tree import common_rows
from afterglow.plan.step import Admit, Gather, Run, Save, Share

IDLE_PREFILL = 2048  # prompt tokens of a step that keeps no decode waiting
PATIENT_PREFILL = 512  # rows of a patient job in a step where prefills are not cut
MAX_TRIED_JOBS = 64  # waiting jobs that are tried in one step
_TOKEN = struct.Struct("<I")


class StepComposer:
    """Composes steps: which jobs run, and over which of their tokens."""

    def __init__(
        self, cache: Cache, queue: RequestQueue, batch: Batch, admission: Admission, options: SchedulerOptions
    ) -> None:
        self.layerwise = options.preload == "layerwise"  # may a job join while its layers are on their way?
        self.wake = inf  # when to look again if nothing happens
        self.outlook = Outlook()
        self._cache = cache
        self._queue = queue
        self._batch = batch
        self._admission = admission
        self._drafts = batch.drafts
        self._chunk = options.prefill_chunk  # prompt tokens beside running decodes; 0: prefills keep decodes waiting
        self._soon = cache.capacity.block_rows // 2  # rows
        self._most = options.max_batch
        self._share_heads = options.shared_pages  # False in journals from before shared pages
        self._sharers: list[int | tuple[int, int]] = []  # the batch whose `_shares` are known
        self._shares: tuple[Share, ...] = ()

    def compose(self, now: float, wake: float, guesses: Mapping[int, Sequence[int]]) -> list[Run]:
        """Choose the runs of the next step. `wake`: when to look again in any case. `guesses`: by job, of tokens that come next."""
        self.wake = wake
        self.outlook.reset()
        runs = self._chosen(now, guesses)
        if self._cache.device.held.windowed:
            for run in runs:
                job = self._queue.jobs[run.job]
                job.lacks = self._cache.device.letting_go(job.lacks, run.start + len(run.tokens))
        return runs

    def _chosen(self, now: float, guesses: Mapping[int, Sequence[int]]) -> list[Run]:
        if self._chunk:
            runs = self._decodes(now, guesses)
            short = runs or all(job.spec.patient for job in self._queue.jobs.values())
            return runs + self._prefills(now, self._chunk if short else max(self._chunk, IDLE_PREFILL))
        patient = all(job.spec.patient for job in self._queue.jobs.values())
        runs = self._prefills(now, PATIENT_PREFILL if patient else IDLE_PREFILL)
        if all(self._queue.jobs[run.job].lingering for run in runs):  # no job waits for those
            runs += self._decodes(now, guesses)
        return runs  # a prefill or decodes, as in the papers

    def _decodes(self, now: float, guesses: Mapping[int, Sequence[int]]) -> list[Run]:
        """Choose a row of every decoding job, and rows of guesses. When a job needs room, jobs that soon need some are given it
        too."""
        running = self._batch.running
        soon = 0
        for job in list(running):
            if job.state != "decoding":
                continue
            if job.rows >= job.segment.capacity:
                self._grow(job, now)
                soon = self._soon
            elif job.drafts and job.drafts[-1].full:
                soon = self._soon
        runs: list[Run] = []
        for job in running:
            if job.state != "decoding":
                continue
            row = job.rows
            if job.segment.capacity - row <= soon:
                self._batch.extend_early(job)
            saves: tuple[Save, ...] = ()
            if job.saving and row >= job.covered:
                saves = self._drafts.tee_one(job, row, soon, now)
            token = _TOKEN.unpack_from(job.tokens, 4 * row)
            run = Run(job.spec.job, row, token, True, job.segment.capacity, None, (), saves)
            offered = guesses.get(job.spec.job) if guesses else None
            runs.append(self._with_guesses(job, run, offered) if offered else run)
        return runs

    def _with_guesses(self, job: Job, run: Run, offered: Sequence[int]) -> Run:
        """Add guesses to the run of a decoding job: as many as its room on the device and in its draft holds, and as its reply
        may still be long."""
        count = min(len(offered), job.capacity - run.start - 1, job.end - job.length - 1)
        count = min(count, self._cache.device.most_new(run.start) - 1)
        stops = (at for at, token in enumerate(offered) if token in job.spec.stop_tokens)
        count = min(count, next(stops, count))  # nothing comes after those
        if job.approximate or (job.saving and not run.saves):
            count = 0
        saves = run.saves
        if saves and count > 0:
            count = self._drafts.tee_more(job, count)
            saves = (saves[0]._replace(rows=1 + count),)
        if count <= 0:
            return run
        return run._replace(tokens=(*run.tokens, *offered[:count]), saves=saves, guessed=count)

    def _prefills(self, now: float, budget: int) -> list[Run]:
        """Choose prompt tokens: first of jobs that are prefilling, then of jobs that join."""
        runs: list[Run] = []
        decoding = any(job.state == "decoding" for job in self._batch.running)
        for job in self._batch.running:
            if job.state == "prefilling" and job.lingering:
                runs.append(self._run(job, budget, None, now))  # it has had its share of the budget
            elif job.state == "prefilling" and budget > 0:
                next_stage = job.stages[0] if job.stages and job.rows == job.stop else None
                alone = not decoding and self.layerwise
                if (
                    not alone
                    and next_stage is not None
                    and not self._admission.decision.may_begin(job, next_stage, now)
                ):
                    self.outlook.restless = True
                    continue  # the others need not wait for its rows
                stop = min(job.length, job.rows + budget)
                if not self._admission.may_save(job, max(job.rows, job.covered), stop, now):
                    self.wake = min(self.wake, self._admission.deadline(job, job.rows, stop))
                    self.outlook.restless = True
                    continue
                job.blocked_since = None
                runs.append(self._run(job, budget, None, now))
                budget -= len(runs[-1].tokens)
        if len(self._batch.running) >= self._most or self._queue.full:
            self.outlook.closed = True
            return runs
        waiting = self._their_turn()
        seats = self._most - len(self._batch.running) - sum(job.has_seat for job in waiting)
        for job in waiting:
            taken = job.has_seat
            if len(self._batch.running) >= self._most:
                break
            if seats <= 0 and not taken:
                continue
            outcome = self._try(job, budget > 0, now)
            self.outlook.awaited = self.outlook.awaited or outcome in (Wait.PREFIX, Wait.SLOTS, Wait.SAVES, Wait.LOADS)
            self.outlook.closed = outcome is Wait.DEVICE
            seats += taken - (isinstance(outcome, Admit) or job.has_seat)
            if isinstance(outcome, Admit):
                runs.append(self._run(job, budget, outcome, now))
                budget -= len(runs[-1].tokens)
            elif outcome in (Wait.DEVICE, Wait.SLOTS, Wait.SAVES, Wait.TURN):
                break  # first come, first served: no job passes another for want of room
        return runs

    def next_in_line(self) -> Job | None:
        """Return the first waiting job whose turn it is and whose rows are not on their way from disk."""
        return next((job for job in self._their_turn() if job.state != "loading"), None)

    def _their_turn(self) -> list[Job]:
        """List the first jobs in the queue, without those whose conversation has another turn that runs or came earlier."""
        busy = {job.conversation for job in self._batch.running} - {None}
        turns = (job for job in self._queue.waiting if job.conversation not in busy and self._queue.is_next_turn(job))
        return list(islice(turns, MAX_TRIED_JOBS))

    def _try(self, job: Job, may_join: bool, now: float) -> Admit | Wait:
        """Attempt to admit a job, unless nothing has changed since the last time."""
        idle = not self._batch.running and self.layerwise
        if self._stands(job, now) and job.verdict is not None and not idle:
            if job.verdict is Wait.LOADS:
                self.wake = min(self.wake, job.again_at)
            return job.verdict
        outcome: Admit | Wait
        if self._admission.compaction.is_promised(job, self._batch.promising()):
            self._cache.counters.waits_prefix += not job.waited
            job.waited, outcome = True, Wait.PREFIX
        else:
            outcome = self._admission.attempt(job, now, idle, may_join)
        if isinstance(outcome, Admit):
            self._queue.admit(job)
            return outcome
        job.state = "loading" if outcome is Wait.LOADS else "waiting"
        # A turn comes with the budget of the next step, slots come with time: of both the version knows nothing.
        lasting = outcome not in (Wait.TURN, Wait.SAVES)
        if outcome is Wait.SAVES:
            self.wake = min(self.wake, self._admission.deadline(job, 0, job.length))
        elif outcome is Wait.LOADS:
            lasting = job.again_at > now
            self.wake = min(self.wake, job.again_at) if lasting else self.wake
        self.outlook.restless = self.outlook.restless or not lasting
        job.tried, job.verdict = (self._queue.version, outcome) if lasting else (-1, None)
        job.lessons = self._cache.cost.lessons
        return outcome

    def _stands(self, job: Job, now: float) -> bool:
        """Would another attempt end as the last one?"""
        if job.tried != self._queue.version:
            return False
        return job.verdict is not Wait.LOADS or (now < job.again_at and job.lessons == self._cache.cost.lessons)

    def _run(self, job: Job, budget: int, admit: Admit | None, now: float) -> Run:
        start = job.rows
        gathers: tuple[Gather, ...] = ()
        if job.stages and (admit is not None or job.rows == job.stop):
            stage = job.stages.pop(0)
            start, gathers, job.stop = stage.start, stage.gathers, stage.stop
            job.lacks = self._cache.device.lacking(job.lacks, start - sum(g.stop - g.start for g in gathers), start)
        rest = (job.stop if job.stop is not None else job.length) - start
        cut = (self._chunk or job.spec.patient) and not job.approximate  # all rows of such a one ask for important ones
        rows = min(rest, budget) if cut else rest
        rows = min(rows, self._cache.device.most_new(start))
        tokens = struct.unpack_from(f"<{rows}I", job.tokens, 4 * start)
        sample = start + rows == job.length and job.remaining > 0
        new = max(start, job.covered)  # rows before it are cached already, and are only computed again
        saves = self._drafts.tee(job, new, start + rows - new, now) if job.saving and start + rows > new else ()
        return Run(job.spec.job, start, tokens, sample, job.capacity, admit, gathers, saves)

    def _grow(self, job: Job, now: float) -> None:
        """Give a decoding job more room, at the cost of retained contexts, then of the job that came last."""
        while job.running and not self._batch.extend(job):
            victim = max(self._batch.running, key=lambda other: other.key)
            if len(self._batch.running) == 1 or job.rows >= self._cache.device.most:
                self._queue.finish(job, None, "length", now)
            else:
                # It may be this very job: were it to push out an older one, they could do so in turns for ever.
                self._cache.counters.preemptions += 1
                self._queue.send_back(victim, now)

    def shared(self, runs: list[Run]) -> tuple[Share, ...]:
        """Find the shares of the step's jobs, anew when the jobs are others, or a job has a longer prefix."""
        sharers: list[int | tuple[int, int]] = [
            run.job if run.own == 1 and run.admit is None else (run.job, run.start) for run in runs
        ]
        if sharers != self._sharers:
            self._sharers = sharers
            jobs = [self._queue.jobs[run.job] for run in runs]
            self._shares = shares([self._sharer(job, run) for job, run in zip(jobs, runs, strict=True)])
        return self._shares

    def _sharer(self, job: Job, run: Run) -> Sharer:
        rows = 0 if job.approximate else run.start  # no other job has the rows of a selection
        return Sharer.of(job, rows, self._drafts.prefix_of(job), self._share_heads)


MIN_SHARED_ROWS = 64  # fewer are not worth a read of their own


class Sharer(NamedTuple):
    """A job of the step: its tokens, and how many rows it has on the device. `common`: its first tokens that are a prefix
    registered for other clients as well. With its `client`'s other prompts it may have the first `head` tokens in common, with its
    salt's all."""

    job: int
    client: str
    salt: str
    tokens: bytes | bytearray
    rows: int
    common: int = 0
    head: int = UNLIMITED

    @classmethod
    def of(cls, job: Job, rows: int, prefix: SharedPrefix | None, heads: bool) -> Sharer:
        """Say what a job with so many rows may share. `prefix`: the registered one that it begins with. `heads`: prompts that were cut
        share the tokens before."""
        salt = job.spec.salt
        client, head = (client_salt(salt), job.head) if heads else (salt, UNLIMITED)
        common = prefix.rows if prefix is not None and prefix.salt != client else 0
        return cls(job.spec.job, client, salt, job.tokens, rows, common, head)


def shares(jobs: Sequence[Sharer], least: int = MIN_SHARED_ROWS) -> tuple[Share, ...]:
    """Find the shares among jobs, each of at least `least` rows and two jobs."""
    groups: dict[str | bytes, list[_Member]] = {}
    for each in jobs:
        if each.rows >= least:
            group = bytes(each.tokens[: 4 * each.common]) or each.client
            groups.setdefault(group, []).append(_Member.of(each))
    found: list[Share] = []
    for members in groups.values():
        if len(members) > 1:
            members.sort()  # those with the most in common lie side by side
            alike = [_alike(a, b) for a, b in zip(members, members[1:], strict=False)]
            _nest([member.job for member in members], alike, 0, least, found)
    return tuple(found)


class _Member(NamedTuple):
    """A sharer's fields, in the order that puts those with the most in common side by side."""

    client: str
    head: bytes
    salt: str
    tokens: bytes
    job: int
    common: int

    @classmethod
    def of(cls, each: Sharer) -> _Member:
        tokens = bytes(each.tokens[: 4 * each.rows])
        return cls(each.client, tokens[: 4 * each.head], each.salt, tokens, each.job, each.common)


def _alike(a: _Member, b: _Member) -> int:
    if a.salt == b.salt:
        return common_rows(a.tokens, 0, b.tokens, 0, min(len(a.tokens), len(b.tokens)) // 4)
    rows = min(len(a.head), len(b.head)) // 4
    return common_rows(a.head, 0, b.head, 0, rows if a.client == b.client else min(rows, a.common))


def _nest(jobs: list[int], alike: list[int], start: int, least: int, found: list[Share]) -> None:
    """`alike[i]`: rows that jobs i and i + 1 have in common. All have the first `start` in common already."""
    rows = min(alike)
    if rows - start >= least:
        found.append(Share(tuple(sorted(jobs)), start, rows))
        start = rows
    first = 0
    for i in range(len(jobs)):
        if i == len(alike) or alike[i] - start < least:  # the next one is of another group
            if i > first:
                group = alike[first:i]
                if min(group) > rows or first > 0 or i < len(alike):
                    _nest(jobs[first : i + 1], group, start, least, found)
            first = i + 1
