"""The engine's thread: plan a step, run it, commit it, and tell callers.

This thread alone reads and changes the plan. It sleeps on one inbox, which callers (submit, cancel, questions) and the
mover (ended transfers) fill, and publishes its statistics once a step, before callers get the step's outputs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from afterglow.engine.durable_notes import DurableNotes
from afterglow.engine.hardware import use_device
from afterglow.engine.idle import IdleWork, UpcomingPrompts
from afterglow.engine.requests import LiveRequest, LiveRequests, Sink, check, job_spec, no_sink, salt_id
from afterglow.engine.setup import EngineParts
from afterglow.engine.speculation.guesser import Guesses
from afterglow.engine.stats import EngineCounters, EngineStats
from afterglow.engine.token_outputs import RunOutput
from afterglow.errors import RequestError, engine_dead, shutting_down
from afterglow.plan.prefix.salts import covers
from afterglow.plan.step import Drop, Emitted, Step
from afterglow.request import Request

log = logging.getLogger("afterglow.engine")

DRAIN_SECONDS = 60.0  # how long closing waits for the disk, before it flushes and again after that
STEP_SECONDS = 10.0  # how long it waits for the step that runs
ANSWER_SECONDS = 10.0  # how long it waits without an answer
DELETED = 1024  # ids of ended requests that are remembered because their conversations were deleted before


class EngineLoop:
    """Drive the scheduler, the store and the runner, step by step, in their thread."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.inbox = parts.inbox
        self.notes = DurableNotes(parts)
        self.idle_work = IdleWork(
            parts.selective, parts.config.importance_exact == "idle", parts.config.reorder_interval
        )
        self.upcoming = UpcomingPrompts()
        self._deleted: deque[str] = deque(maxlen=DELETED)
        self._counters = EngineCounters(relay=parts.runner.relayed, gather=parts.runner.gathered)
        if parts.kv_events is not None:
            self._counters.kv_events = parts.kv_events.counters
        self.requests = LiveRequests(parts.config.max_queue, self._counters, self._forget)
        self._guesses: Guesses = {}  # of what jobs draw next
        self._eos = frozenset(parts.decoder.spec.eos_ids)
        self.published = self._snapshot()
        self._thread: threading.Thread | None = None
        self._refuses = False  # new requests
        self._stopping = False
        self._flush_at_end = True
        self._wake_at: float | None = None
        self._moved = 0  # transfers that have ended
        self.disk_answers = True  # as far as closing has found out
        self.failure: BaseException | None = None

    # -------------------------------------------------------------------------------------------- from any thread

    def start(self) -> None:
        """Start the thread."""
        self.inbox.open()
        self._thread = threading.Thread(target=self.run, name="afterglow-engine", daemon=True)
        self._thread.start()

    def stop(self, flush: bool) -> None:
        """Cancel all requests, write dirty KV to disk (`flush`), and end the thread."""
        self._refuses = True
        if self._thread is not None and self._thread.is_alive():
            self.inbox.send(lambda: self._begin_stop(flush))
            self._thread.join(STEP_SECONDS + 2 * DRAIN_SECONDS)  # it settles, flushes and settles again

    def submit(self, request: Request, sink: Sink, salt: str) -> None:
        """Queue a request under a salt of the plan's.

        Raises: see `prepare`.
        """
        self.accept([self.prepare(request, sink, salt)])

    def prepare(self, request: Request, sink: Sink, salt: str, own: bool = False, patient: bool = False) -> LiveRequest:
        """Make a request that is to be accepted under a salt of the plan's. `own`: the request is the engine's own; `patient`: and
        goes on in short passes.

        Raises: RequestError, for a request that can never be answered, a full queue, a stopped engine.
        """
        parts = self.parts
        check(request, parts.limits)
        if self._refuses or self.failure is not None:
            raise shutting_down() if self.failure is None else engine_dead()
        # What is refused takes no place in the queue.
        constraint = parts.grammars.constraint(request.sampling)
        spec = job_spec(request, parts.config, self._eos, salt)
        plain = constraint is None and request.sampling.logprobs is None
        job = self.requests.reserve(request.id, own)
        spec = replace(spec, job=job, aside=own, patient=patient, plain=plain)
        return LiveRequest(request, sink, spec, constraint)

    def accept(self, prepared: Sequence[LiveRequest]) -> None:
        """Queue requests: the engine's thread takes in all of them before its next step."""

        def take_in() -> None:
            for live in prepared:
                self._accept(live)

        self.inbox.send(take_in)

    def cancel(self, request_id: str) -> None:
        """End a request. Unknown ids are ignored."""
        job = self.requests.job_of(request_id)
        if job is not None:
            self.inbox.send(lambda: self._cancel(job))

    # ------------------------------------------------------------------------------- actions, on the engine's thread

    def settle(self) -> bool:
        """Run steps until the plan and the store are both at rest. Returns False if the disk has not answered for long."""
        now = self.parts.clock
        deadline = now() + DRAIN_SECONDS
        patience, moved = now() + ANSWER_SECONDS, self._moved
        while (at := now()) < min(deadline, patience):
            if self._iterate() or self._moved != moved:
                patience, moved = now() + ANSWER_SECONDS, self._moved
                continue
            if not self.requests.by_job and self.parts.store.at_rest():
                return True
            self._take_actions(0.1)
        log.warning("the store was still busy after %.0f s", at - deadline + DRAIN_SECONDS)
        return False

    def flush(self) -> bool:
        """Write all dirty KV to disk. Returns False if the disk has not answered for long."""
        self.parts.scheduler.flush(self.parts.clock())
        return self.settle()

    def reset(self, whose: str | None) -> None:
        """Forget cached rows of one salt of the plan's, or of all salts (see `covers`)."""
        self._look_up_no_more()
        self.forget_idle_work(lambda request: covers(whose, salt_id(request.salt)))
        self.parts.scheduler.reset(self.parts.clock(), whose)
        if self.parts.scores is not None:
            self.parts.scores.forget_all(whose)

    def forget_session(self, tenant: str, name: str) -> bool:
        """Remove a named conversation from all tiers. `tenant`: the plan's salt. Returns False if there is none."""
        self._look_up_no_more()
        known = self.forget_idle_work(lambda request: (salt_id(request.salt), request.session_id) == (tenant, name))
        return self.parts.scheduler.forget_session(tenant, name) or known

    def forget_idle_work(self, belongs: Callable[[Request], bool]) -> bool:
        """Give up exact prompts of conversations that have been deleted. Returns whether there were any."""
        for live in self.requests.by_job.values():
            live.deleted = live.deleted or belongs(live.request)
        before = len(self.idle_work) + len(self.upcoming)
        for name in (*self.idle_work.forget(belongs), *self.upcoming.forget(belongs)):
            job = self.requests.job_of(name)
            assert job is not None
            self._cancel(job)
        return len(self.idle_work) + len(self.upcoming) < before

    def expect(self, prompts: Sequence[Request], after: str | None) -> None:
        """Compute prompts of one next turn while the engine is idle (see `UpcomingPrompts`), unless the conversation of the
        request before (`after`) was deleted while that ran."""
        if not self._refuses and after not in self._deleted:
            self.upcoming.add(prompts, self.parts.clock())

    def submit_own(self, request: Request, patient: bool = False) -> bool:
        """Queue a request of the engine's own, which may be `patient`. Returns False if there is no room for it."""
        try:
            self._accept(self.prepare(request, no_sink, salt_id(request.salt), own=True, patient=patient))
        except RequestError:
            return False
        return True

    # ---------------------------------------------------------------------------------------------- the thread itself

    def run(self) -> None:
        """Run steps until `stop`."""
        use_device(self.parts.decoder.device)
        try:
            while not self._stopping:
                busy = self._iterate()
                self._take_actions(0 if busy else self._sleep())
            self.disk_answers = self.settle()
            if self.disk_answers and self._flush_at_end:
                self.disk_answers = self.flush()
                self.notes.give_up()
                self._count()
            self.notes.remember(last=True)
            self._take_actions(0)  # refuses requests that have come meanwhile
        except BaseException as error:
            log.exception("the engine has stopped because of an error")
            self.failure = error
            self.inbox.close(failed=True)
            for live in list(self.requests.by_job.values()):
                self.requests.fail(live, "internal error")
            self._deliver()
        else:
            self.inbox.close()

    def _sleep(self) -> float | None:
        """Compute how long an idle engine may sleep, in seconds; None: until something arrives."""
        return None if self._wake_at is None else max(0.0, self._wake_at - self.parts.clock())

    def _take_actions(self, timeout: float | None) -> None:
        self.inbox.take(timeout, self._count)
        if self.requests.has_outputs:
            self._publish()

    def _iterate(self) -> bool:
        """Plan and run one step. Returns False when there is nothing to do until something arrives."""
        began = time.perf_counter()
        done = self.parts.store.finished()
        if done:
            self._moved += len(done)
            self.requests.take_in(self.parts.scheduler.complete(done, self.parts.clock()), None)
        if self.parts.sharing is not None:
            self.parts.sharing.ended(done)
        self.notes.now_and_then(self.parts.clock())
        step = self.parts.scheduler.schedule(self.parts.clock(), guesses=self._guesses)
        self._wake_at = step.wake_at
        if step.idle or any(run.admit is not None for run in step.runs):  # the pass may take long
            self._publish()
        if step.idle:
            more = self.idle_work.begin(self.parts.clock(), True, self.submit_own)
            more = more or (
                not self.requests.by_job
                and self.upcoming.begin(self.parts.clock(), partial(self.submit_own, patient=True))
            )
            wakes = [at for at in (step.wake_at, self.idle_work.wakes(self.parts.clock())) if at is not None]
            self._wake_at = min(wakes, default=None)
            return more
        self._execute(step, began)
        self.idle_work.begin(self.parts.clock(), False, self.submit_own)
        return True

    def _execute(self, step: Step, began: float) -> None:
        self.parts.runner.release(step)
        if self.parts.selective is not None:
            for drop in step.moves:
                if isinstance(drop, Drop):
                    self.parts.selective.loader.forget(drop.extent)
        if self.parts.sharing is not None:
            self.parts.sharing.begin(step.moves)
        self.parts.store.start(step.moves)
        if step.urged:
            self.parts.store.urge(step.urged)
            for move in step.urged:
                self.parts.store.release(move)
        if self.parts.config.cache.write_buffer == "auto" and any(run.admit is not None for run in step.runs):
            self.parts.store.expect_saves(*self.parts.scheduler.unsaved())
        live = self.requests.by_job
        ran = time.perf_counter()
        for run in step.runs:
            if run.admit is not None and (first := live[run.job]).waited is None:
                first.waited = ran - first.arrived
        out = self.parts.runner.run(step)
        self._keep_guesses(step, out)
        ended = time.perf_counter()
        done = [(run, live[run.job]) for run in step.runs if run.job not in out.result.waiting]
        prefilled = sum(each.prompt_rows(run) for run, each in done if not each.spec.aside)
        self._counters.idle_tokens += sum(run.own for run, each in done if each.spec.aside)
        self.idle_work.computed(sum(run.own for run, each in done if not each.spec.aside))
        moved = self.parts.store.finished()
        events = self.parts.scheduler.commit(step, out.result, moved, self.parts.clock())
        if self.parts.sharing is not None:
            self.parts.sharing.ended(moved)
        for job, error in out.broken.items():
            self.requests.fail(live[job], str(error), error.param)
            self.parts.scheduler.cancel(job, self.parts.clock())  # unless its last token has ended it
        self.requests.take_in(events, out)
        self._counters.step(ran - began + time.perf_counter() - ended, ended - ran, prefilled)
        self._publish()

    def _keep_guesses(self, step: Step, out: RunOutput) -> None:
        for job in out.result.tokens:
            self._guesses.pop(job, None)
        self._guesses.update(out.guesses)
        self._counters.drafts(sum(run.guessed for run in step.runs), sum(out.result.accepted.values()))

    def _publish(self) -> None:
        """Publish statistics, then deliver outputs: a caller who gets an output finds it counted."""
        self._count()
        self._deliver()

    def _count(self) -> None:
        if self.parts.kv_events is not None:
            self.parts.kv_events.publish()
        self.published = self._snapshot()

    def _snapshot(self) -> EngineStats:
        selective = self.parts.selective
        if selective is not None:
            selective.loader.count_reads()
        return EngineStats.counted(
            self._counters, self.parts.scheduler.stats(), selective.loader.stats if selective is not None else None
        )

    def _deliver(self) -> None:
        while self.requests.has_outputs:
            for job in self.requests.deliver():
                self._cancel(job)

    def _accept(self, live: LiveRequest) -> None:
        if not live.spec.aside and len(self.upcoming):
            stopped = self.upcoming.give_way(live.request)
            job = self.requests.job_of(stopped) if stopped is not None else None
            if job is not None:
                self._cancel(job)
        self.requests.by_job[live.spec.job] = live
        sharing = self.parts.sharing
        with self._fault_of(live):
            if self._stopping:  # it was prepared before
                raise shutting_down()
            self.parts.runner.register(live.spec.job, live.request, live.constraint)
            if sharing is None or not sharing.looks_up(live.spec, partial(self._queue, live)):
                self._submit_to_plan(live)

    @contextlib.contextmanager
    def _fault_of(self, live: LiveRequest) -> Iterator[None]:
        """End a request with what goes wrong inside: one request's fault must not end the others."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, RequestError):
                log.exception("a request could not be accepted")
            self.requests.fail(live, str(error))

    def _look_up_no_more(self) -> None:
        if self.parts.sharing is not None:
            self.parts.sharing.wait_no_more()

    def _queue(self, live: LiveRequest) -> None:
        """Queue a request whose prompt has been looked up."""
        with self._fault_of(live):
            self._submit_to_plan(live)

    def _submit_to_plan(self, live: LiveRequest) -> None:
        spec, scores = live.spec, self.parts.scores
        if scores is not None and (wanted := self.parts.scheduler.cache.outgrown(spec)) is not None:
            spec = replace(spec, scores=tuple(scores.of(*wanted).tolist()))
        live.cut = self.parts.scheduler.submit(spec, self.parts.clock())
        if live.cut is not None:
            self.parts.runner.shorten(spec.job, live.cut.prompt)
        if scores is not None:
            scores.begin(spec.job, spec.salt, spec.prompt, live.cut)

    def _cancel(self, job: int) -> None:
        sharing = self.parts.sharing
        if sharing is not None and sharing.gives_up(job):  # the plan does not know it yet
            self.requests.take_in([Emitted(job, None, "cancelled")], None)
        else:
            self.requests.take_in(self.parts.scheduler.cancel(job, self.parts.clock()), None)

    def _forget(self, live: LiveRequest) -> None:
        """Forget a request that has ended; if it selected rows, have its prompt computed exactly when there is time."""
        self.parts.runner.forget(live.spec.job)
        self._guesses.pop(live.spec.job, None)
        if self.parts.scores is not None:
            self.parts.scores.end(live.spec.job)
        self.idle_work.ended(live.request.id)
        self.upcoming.ended(live.request.id)
        if live.deleted:
            self._deleted.append(live.request.id)
        if live.selected is not None and not live.deleted:
            rows = len(live.request.prompt) - live.selected.rows
            self.idle_work.add(live.request, max(1, rows), self.parts.clock())

    def _begin_stop(self, flush: bool) -> None:
        for job in list(self.requests.by_job):
            self._cancel(job)
        self._flush_at_end = flush
        self._stopping = True
