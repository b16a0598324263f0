"""The engine: the only room that joins plan, store and model.

One thread owns the plan: nothing else reads it. It sleeps on one inbox, which callers (submit, cancel) and the mover
(completions) fill, and publishes its numbers once a step, before callers are told of the step.
Knows token ids only: text, HTTP and chat templates are outside.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from afterglow.config import EngineConfig, PreloadName, SourceName
from afterglow.engine import prefixes, selftest
from afterglow.engine.aside import Aside
from afterglow.engine.requests import Completion, check, completion_of, discarding, job_spec, salt_id, token_bytes
from afterglow.engine.runner import Runner, RunOutput
from afterglow.engine.setup import Parts, build, choose_device, use_device
from afterglow.engine.stats import EngineStats, Snapshot, Totals, collect
from afterglow.errors import RequestError
from afterglow.plan.ranges import Rows
from afterglow.plan.salts import covers, earlier_name, everything_of
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import Admitted, Drop, Emitted, Event, JobSpec, Run, Step
from afterglow.plan.truncation import Cut
from afterglow.request import (
    CachedTokens,
    Missed,
    Output,
    PrefixInfo,
    Request,
    Selected,
    SessionInfo,
    TokenLogprob,
    Truncation,
)
from afterglow.store.kvstore import KVStore
from afterglow.store.throttle import Throttle

log = logging.getLogger("afterglow.engine")

T = TypeVar("T")
Sink = Callable[[Output], None]
Progress = Callable[[str, int, int], None]

TOUCH_SECONDS = 5.0
NO_MEMORY = (
    "the device has no memory left for this request; send a shorter prompt, or have the operator lower --device-cache or "
    "--prefill-chunk"
)
DRAIN_SECONDS = 60.0  # how long closing waits for the disk
CLOSE_SECONDS = 10.0  # and then for its calls to return
ANSWER_SECONDS = 10.0  # and how long for one that does not answer


@dataclass(slots=True)
class _Live:
    """A request between submit and its last output."""

    job: int
    request: Request
    sink: Sink
    spec: JobSpec
    cut: Cut | None = None
    truncation: Truncation | None = None
    selected: Selected | None = None
    admitted: bool = False
    deleted: bool = False  # what it leaves in the cache has been deleted since it came
    cached: CachedTokens = CachedTokens()
    missed: Missed = Missed()
    arrived: float = field(default_factory=time.perf_counter)
    waited: float | None = None  # until its first step
    generated: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)


class Engine:
    """Submit requests, receive outputs. `Engine.load` builds one; `start` begins, `close` ends it."""

    def __init__(self, parts: Parts, config: EngineConfig) -> None:
        self.config = config
        self.model_dir = parts.model_dir
        self.model_name = parts.model_name
        self.max_model_len = parts.max_model_len
        self.capacity = parts.capacity
        self.decoder = parts.decoder  # may be used beside the engine: a pass writes nothing but its result
        self.vocab_size = parts.vocab_size
        self.conversations = parts.conversations  # responses that clients go on from by id
        self.eos_token_ids = parts.eos_token_ids
        self._eos = frozenset(parts.eos_token_ids)
        self._scheduler: Scheduler = parts.scheduler
        self._store: KVStore = parts.store
        self._runner: Runner = parts.runner
        self._scores = parts.scores
        self._aside = Aside(parts.important, self.config.importance_exact == "idle", self.config.reorder_interval)
        self._parts = parts
        self._epoch = time.time() - time.monotonic()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._touched_at = 0.0
        self._store_failures = 0  # that have been told of
        self._woken = threading.Event()
        parts.notify.target, parts.notify.pressed = self._wake, self._is_pressed
        self._live: dict[int, _Live] = {}
        self._jobs: dict[str, int] = {}
        self._next_job = 0
        self._waiting = 0  # submitted and not yet admitted, as callers see it
        self._lock = threading.Lock()
        self._totals = Totals()
        self._outbox: list[tuple[_Live, Output]] = []  # what callers are to be told when the numbers are published
        self._published = self._snapshot()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._stopping = False
        self._flush_at_end = True
        self._answers = True  # does the disk, as far as closing has found out?
        self._wake_at: float | None = None
        self._moved = 0  # completions taken in while nothing was computed
        self._failure: BaseException | None = None

    @classmethod
    def load(
        cls,
        model: str | Path,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        throttle: Throttle | None = None,
        name: str | None = None,
    ) -> Engine:
        """Read a Hugging Face model directory (or a preset's name, `bench-100m`) and open its cache.

        `throttle` slows the disk tier down, for benchmarks. `name`: what to call the model, and its folder in the cache
        directory; default: as its directory.
        Errors: ModelError, ConfigError.
        """
        config = config or EngineConfig()
        if config.device == "auto":
            found = str(choose_device("auto"))
            fit = found == "cpu" or selftest.works(lambda trial: cls.load(selftest.MODEL, trial), found)
            config = replace(config, device=found if fit else "cpu")
        return cls(build(model, config, progress, throttle, name), config)

    # ------------------------------------------------------------------------------- for callers, any thread

    @property
    def healthy(self) -> bool:
        """False once the engine thread has died or was never started."""
        return self._thread is not None and self._thread.is_alive() and self._failure is None

    def start(self) -> None:
        """Start the engine thread."""
        self._thread = threading.Thread(target=self._main, name="afterglow-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; `sink` gets its outputs, from the engine's thread, until one has a `finish_reason`.

        Errors: RequestError (too long, a token outside the vocabulary, queue full, engine stopped).
        """
        self._submit(request, sink, salt_id(request.salt))

    def _submit(self, request: Request, sink: Sink, salt: str, aside: bool = False) -> None:
        """The same under any salt, as the plan knows it. `aside`: it is the engine's own."""
        check(request, self._scheduler, self.vocab_size, self.max_model_len)
        with self._lock:
            if self._closing or self._failure is not None:
                raise RequestError("the server is shutting down", status=503, code="unavailable")
            if self._waiting >= self.config.max_queue:
                raise RequestError(
                    f"{self._waiting} requests are waiting already (--max-queue); try again later",
                    status=429,
                    code="queue_full",
                )
            if request.id in self._jobs:
                raise RequestError(f"request id {request.id!r} is in use", param="request_id")
            job = self._next_job
            self._next_job += 1
            self._jobs[request.id] = job
            self._waiting += 1
        live = _Live(job, request, sink, replace(job_spec(job, request, self.config, self._eos, salt), aside=aside))
        if request.sampling.prompt_logprobs is not None:
            live.prompt_logprobs.append(None)
        if aside:
            self._accept(live)  # it is the engine's thread that asks
        else:
            self._send(lambda: self._accept(live))

    def cancel(self, request_id: str) -> None:
        """End a request now; it gets a last output with reason `cancelled`. Unknown ids are ignored."""
        with self._lock:
            job = self._jobs.get(request_id)
        if job is not None:
            self._send(lambda: self._cancel(job))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run requests to the end and return their replies, in order. The engine must have been started."""
        inbox: queue.SimpleQueue[tuple[float, Output]] = queue.SimpleQueue()
        began = time.perf_counter()
        for request in requests:
            self.submit(request, lambda output: inbox.put((time.perf_counter(), output)))
        gathered: dict[str, list[Output]] = {r.id: [] for r in requests}
        first: dict[str, float] = {}
        left = len(gathered)
        while left:
            try:
                at, output = inbox.get(timeout=0.5)
            except queue.Empty:
                if self.healthy:
                    continue
                raise RequestError("the engine has stopped", status=503, code="unavailable") from None
            first.setdefault(output.request_id, at - began)
            gathered[output.request_id].append(output)
            left -= output.finish_reason is not None
        return [completion_of(gathered[r.id], first[r.id]) for r in requests]

    def stats(self) -> EngineStats:
        """Counters and levels as of the last step; waits neither for the engine's thread nor for a file system."""
        parts = self._parts
        found = collect(
            self._published, self._store.stats(), parts.capacity, parts.device_row_bytes, parts.host_block_bytes
        )
        return replace(found, damaged_responses=self.conversations.damaged)

    def _snapshot(self) -> Snapshot:
        """What the engine's thread counts, as it is now. Only that thread calls it."""
        important = self._parts.important
        return Snapshot.of(
            self._totals,
            self._scheduler.stats(),
            self._parts.relayed,
            important.loader.stats if important is not None else None,
        )

    def reset_cache(self, salt: str | None = None, *, tenant: str | None = None) -> None:
        """Forget every cached row that no running request needs, in all tiers, names, truncations and registered prefixes
        included: of one salt, of all salts of a tenant (see `Request.salt`), or of everybody. The operator's prefixes stay."""
        whose = salt_id(salt) if salt is not None else None
        if tenant is not None:
            whose = everything_of(tenant)
            earlier = earlier_name(f"{tenant}/")
            self._send(lambda: self._reset(earlier))
        self._send(lambda: self._reset(whose))

    def _reset(self, whose: str | None) -> None:
        self._forget_aside(lambda request: covers(whose, salt_id(request.salt)))
        self._scheduler.reset(self._now(), whose)
        if self._scores is not None:
            self._scores.forget_all(whose)

    def discard(
        self,
        context: Sequence[int],
        dropped: Sequence[int] | Sequence[Rows],
        *,
        system_rows: int,
        salt: str = "",
        session_id: str | None = None,
    ) -> Truncation:
        """Leave tokens out of a conversation from now on, and keep the KV of all others (CachedAttention §3.4, token
        discarding lists of compression methods; spec A14).

        `context`: all its tokens so far, those that were left out before included. `dropped`: which of them go, as
        indices (ascending) or as ranges [start, stop). `system_rows`: tokens of the system prompt, which stay; say 0 to
        have them discarded too. The KV that remains is copied in host under a salt of its own (X2): the prefix index
        never gives it to anybody else. Turns that begin with the same context and have `truncation` set go on from it,
        at new positions, also after a restart. Waits for the copy, and computes one token: the last.

        Errors: RequestError for a list that is empty, not ascending, outside of the context, into the system prompt, or
        that leaves nothing; for a conversation of which nothing is cached (404); for models with learned positions.
        """
        request = discarding(context, dropped, system_rows, salt, session_id)
        check(request, self._scheduler, self.vocab_size, self.max_model_len)
        if not self._ask(lambda: self._scheduler.knows(salt_id(salt), token_bytes(context))):
            raise RequestError(
                "nothing of this conversation is cached, so there is nothing to keep of it",
                status=404,
                code="conversation_not_found",
            )
        (done,) = self.generate([request])
        assert done.truncation is not None
        return done.truncation

    def sessions(self, salt: str) -> list[SessionInfo]:
        """One tenant's conversations that have a name, the last used first."""
        found = self._ask(lambda: self._scheduler.sessions(salt_id(salt)))
        return [SessionInfo(s.name, s.rows, s.device, s.host, s.disk, s.used, s.expires, s.pinned) for s in found]

    def pin_session(self, salt: str, name: str, pinned: bool) -> bool:
        """Keep a conversation in some tier whatever happens, or no longer. False: there is none of that name. Errors:
        RequestError, where its tenant has pinned as much as it may."""

        def work() -> bool | RequestError:
            try:
                return self._scheduler.pin_session(salt_id(salt), name, pinned)
            except RequestError as error:  # not the engine's fault, which would end it
                return error

        done = self._ask(work)
        if isinstance(done, RequestError):
            raise done
        return done

    def forget_session(self, salt: str, name: str) -> bool:
        """Remove a conversation and what only it has used from all tiers. False: there is none of that name."""
        return self._ask(lambda: self._forget_session(salt_id(salt), name))

    def _forget_session(self, tenant: str, name: str) -> bool:
        known = self._forget_aside(lambda request: (salt_id(request.salt), request.session_id) == (tenant, name))
        return self._scheduler.forget_session(tenant, name) or known

    def _forget_aside(self, belongs: Callable[[Request], bool]) -> bool:
        """What has been deleted is not to be computed again when there is time for it. Was there something?"""
        for live in self._live.values():
            live.deleted = live.deleted or belongs(live.request)
        before = len(self._aside)
        for name in self._aside.forget(belongs):
            self._cancel(self._jobs[name])
        return len(self._aside) < before

    def register_prefix(
        self, name: str, tokens: Sequence[int], *, salt: str | None = "", about: str = ""
    ) -> PrefixInfo:
        """Compute a prefix now, or load it, and keep it from now on: in host, on disk and, where there is room beside the
        longest context, on the device. All requests under this salt whose prompts begin so find it; with None, the
        operator's, those of all tenants, who share nothing else thereby. Known again after a restart. `about`: a text
        that is told again then. Another one of this name is replaced. Waits until it is kept.

        Errors: RequestError, where it is longer than the context or than half of a tier's budget.
        """
        return prefixes.register(self, name, tokens, salt, about)

    def forget_prefix(self, name: str, *, salt: str | None = "") -> bool:
        """Keep a registered prefix no longer than anything else. False: there is none of that name."""
        return prefixes.forget(self, name, salt)

    def prefixes(self, salt: str | None = "") -> list[PrefixInfo]:
        """What is registered under a salt; None: by the operator."""
        return self.all_prefixes().get(prefixes.owner_of(salt), [])

    def all_prefixes(self) -> dict[str, list[PrefixInfo]]:
        """All that is registered, by the plan's name of the salt (see `engine.prefixes.owner_of`)."""
        return prefixes.listing(self)

    def _ask(self, question: Callable[[], T]) -> T:
        """The answer of the engine's thread."""
        answers: list[T] = []
        self._on_thread(lambda: answers.append(question()))
        if not answers:
            raise RequestError("the engine has stopped", status=503, code="unavailable")
        return answers[0]

    def _now(self) -> float:
        """Seconds since 1970 that never go backwards: the catalog compares them over restarts."""
        return self._epoch + time.monotonic()

    def settle(self) -> None:
        """Wait until nothing runs and every save and move has ended (benchmarks, tests)."""
        self._ask(self._settle)

    def baseline(
        self, *, preload: PreloadName = "layerwise", read_buffer: int | None = None, source: SourceName = "load"
    ) -> None:
        """Go on as one of CachedAttention's baselines: no pre-loading, a read buffer of so many layers, or one of the two
        ways to cached rows alone (benchmarks)."""
        self._on_thread(lambda: self._scheduler.baseline(preload, read_buffer, source))

    def demote(self, tier: Literal["host", "disk"]) -> None:
        """Push all idle KV down to `tier`, so that it is in no faster one (benchmarks, tests)."""

        def action() -> None:
            self._scheduler.drop_contexts()
            if tier == "disk":
                self._scheduler.flush(self._now())
                self._settle()
                self._scheduler.drop_clean_host()
            self._settle()

        self._on_thread(action)

    def _on_thread(self, action: Callable[[], None]) -> None:
        """Run `action` on the engine's thread and wait for it."""
        ended = threading.Event()

        def wrapped() -> None:
            try:
                action()
            finally:
                self._published = self._snapshot()
                ended.set()

        self._send(wrapped)
        while not ended.wait(0.1):
            if not self.healthy:
                raise RequestError("the engine has stopped", status=503, code="unavailable")

    def close(self, flush: bool = True) -> None:
        """Cancel what runs, bring dirty KV to disk (`flush`), stop the thread, release the cache directory."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        if self._thread is not None and self._thread.is_alive():
            self._send(lambda: self._stop(flush))
            self._thread.join(DRAIN_SECONDS + 10)
        self._store.close(CLOSE_SECONDS if self._answers else 1.0)
        self.conversations.close()
        if self._parts.journal is not None:
            self._parts.journal.close()

    # --------------------------------------------------------------------------------- the engine's own thread

    def _send(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)

    def _is_pressed(self) -> bool:
        """Does a caller wait for this thread? (Completions do not count.)"""
        return self._inbox.qsize() > self._woken.is_set()

    def _wake(self) -> None:
        """From the mover's threads: a completion is waiting. Coalesced, so that the inbox cannot grow."""
        if not self._woken.is_set():
            self._woken.set()
            self._inbox.put(self._woken.clear)

    def _accept(self, live: _Live) -> None:
        self._live[live.job] = live
        try:
            self._runner.register(live.job, live.request)
            self._plan(live)
        except Exception as error:  # one request's fault must not be everybody's
            if not isinstance(error, RequestError):
                log.exception("a request could not be accepted")
            self._finish(live, Output(live.request.id, (), "error", error=str(error)))

    def _submit_own(self, request: Request) -> bool:
        """A request of the engine's own, whose answer nobody waits for. False: there is no room for it."""
        try:
            self._submit(request, _nobody, salt_id(request.salt), aside=True)
        except RequestError:
            return False
        return True

    def _plan(self, live: _Live) -> None:
        spec, scores = live.spec, self._scores
        if scores is not None and (wanted := self._scheduler.outgrown(spec)) is not None:
            spec = replace(spec, scores=tuple(scores.of(*wanted).tolist()))
        live.cut = self._scheduler.submit(spec, self._now())
        if live.cut is not None:
            self._runner.shorten(live.job, live.cut.prompt)
        if scores is not None:
            scores.begin(live.job, spec.salt, spec.prompt, live.cut)

    def _main(self) -> None:
        use_device(self.decoder.device)
        try:
            while not self._stopping:
                busy = self._iterate()
                self._take_inbox(block=not busy)
            self._answers = self._settle()
            if self._answers and self._flush_at_end:
                self._scheduler.flush(self._now())
                self._answers = self._settle()
                self._give_up()
            self._remember(last=True)
        except BaseException as error:
            log.exception("the engine has stopped because of an error")
            self._failure = error
            for live in list(self._live.values()):
                self._finish(live, Output(live.request.id, (), "error", error="internal error"))
            self._deliver()

    def _take_inbox(self, block: bool, timeout: float | None = None) -> None:
        """Do what callers asked for; with `block`, wait for something first."""
        if block and timeout is None and self._wake_at is not None:
            timeout = max(0.0, self._wake_at - self._now())
        while True:
            try:
                action = self._inbox.get(block, timeout)
            except queue.Empty:
                break
            action()
            block = False
        if self._outbox:
            self._publish()

    def _iterate(self) -> bool:
        """One step; False when there is nothing to do until something arrives."""
        began = time.perf_counter()
        done = self._store.finished()
        if done:
            self._moved += len(done)
            self._dispatch(self._scheduler.complete(done, self._now()), None)
        self._remember_use()
        step = self._scheduler.schedule(self._now())
        self._wake_at = step.wake_at
        if step.idle or any(run.admit is not None for run in step.runs):  # the pass may take long
            self._publish()
        if step.idle:
            more = self._aside.turn(self._now(), True, self._submit_own)
            wakes = [at for at in (step.wake_at, self._aside.wakes(self._now())) if at is not None]
            self._wake_at = min(wakes, default=None)
            return more
        self._execute(step, began)
        self._aside.turn(self._now(), False, self._submit_own)
        return True

    def _remember_use(self) -> None:
        """Now and then tell the catalog which extents were used, so that eviction knows after a restart."""
        now = self._now()
        if now - self._touched_at >= TOUCH_SECONDS:
            self._touched_at = now
            self._remember()

    def _give_up(self) -> None:
        """Tell what the disk had no room for. Without a disk tier nothing is ever kept."""
        budget = self._parts.capacity.disk_bytes
        lost = self._scheduler.give_up() if budget else None
        if lost is not None and lost.extents:
            log.warning(
                "%d tokens (%d extents, %.1f MB) end with this process: they are not on disk, whose budget of %.1f MB has %.1f MB"
                " left (--disk-cache)",
                lost.rows,
                lost.extents,
                lost.bytes / 1e6,
                budget / 1e6,
                max(0, budget - self._scheduler.stats().disk_bytes) / 1e6,
            )
        self._published = self._snapshot()

    def _remember(self, last: bool = False) -> None:
        counters = self._scheduler.stats().counters
        failed, self._store_failures = counters.store_failures - self._store_failures, counters.store_failures
        if failed:
            log.warning("%d extents could not be written to disk: is it full, or read-only?", failed)
        self._store.touch(self._scheduler.take_touched())
        notes: dict[str, list[tuple[str, str | None]]] = {}
        for kind, key, value in self._scheduler.take_notes(last):
            notes.setdefault(kind, []).append((key, value))
        for kind, items in notes.items():
            self._store.note(kind, items)

    def _execute(self, step: Step, began: float) -> None:
        self._runner.release(step)
        if self._parts.important is not None:
            for drop in step.moves:
                if isinstance(drop, Drop):
                    self._parts.important.loader.forget(drop.extent)
        self._store.start(step.moves)
        if step.urged:
            self._store.urge(step.urged)
            for move in step.urged:
                self._store.release(move)
        ran = time.perf_counter()
        for run in step.runs:
            if run.admit is not None and (live := self._live[run.job]).waited is None:
                live.waited = ran - live.arrived
        out = self._runner.run(step)
        ended = time.perf_counter()
        ended_runs = [run for run in step.runs if run.job not in out.result.waiting]
        prefilled = sum(self._prompt_rows(run) for run in ended_runs)
        self._aside.computed(sum(len(run.tokens) for run in ended_runs if not self._live[run.job].spec.aside))
        events = self._scheduler.commit(step, out.result, self._store.finished(), self._now())
        self._dispatch(events, out)
        self._totals.step(ran - began + time.perf_counter() - ended, ended - ran, prefilled)
        self._publish()

    def _publish(self) -> None:
        """Publish the numbers, then tell callers what there is: who has been told of something finds it counted."""
        self._published = self._snapshot()
        self._deliver()

    def _deliver(self) -> None:
        """Tell callers. A sink that raises ends its own request."""
        while self._outbox:
            outbox, self._outbox = self._outbox, []
            for live, output in outbox:
                try:
                    live.sink(output)
                except Exception:
                    log.exception("the sink of request %s has failed: the request is cancelled", live.request.id)
                    live.sink = _nobody
                    if live.job in self._live:
                        self._cancel(live.job)

    def _prompt_rows(self, run: Run) -> int:
        """Rows of a run that belong to the prompt, not to the reply."""
        live = self._live[run.job]
        dropped = live.cut.dropped if live.cut is not None else 0
        return max(0, min(len(run.tokens), len(live.request.prompt) - dropped - run.start))

    def _dispatch(self, events: Sequence[Event], out: RunOutput | None) -> None:
        for job, (start, found) in (out.prompt_logprobs if out else {}).items():
            known = self._live[job].prompt_logprobs
            del known[start + 1 :]  # a job that was sent back starts again
            known.extend(found)
        for job, selected in (out.selected if out else {}).items():
            self._live[job].selected = selected
        for event in events:
            live = self._live.get(event.job)
            if live is None:
                continue
            if isinstance(event, Admitted):
                live.cached = CachedTokens(event.device, event.host, event.disk)
                # What others have is counted, and told to nobody.
                live.missed = Missed("cold" if event.why == "salt" else event.why, event.missed)
                if live.cut is not None:
                    kept = len(live.request.prompt) - event.dropped
                    live.truncation = Truncation(event.dropped, kept, event.embedded, live.cut.reason)
                self._leave_queue(live)
                self._totals.admitted(len(live.request.prompt), live.cached)
            else:
                self._emit(live, event, out)

    def _emit(self, live: _Live, event: Emitted, out: RunOutput | None) -> None:
        tokens = () if event.token is None else (event.token,)
        logprob = out.logprobs.get(live.job) if out and tokens else None
        first = live.generated == 0
        live.generated += len(tokens)
        self._totals.generation_tokens += len(tokens)
        output = Output(
            live.request.id,
            tokens,
            "error" if event.finish == "no_memory" else event.finish,
            live.cached,
            (logprob,) if logprob else (),
            tuple(live.prompt_logprobs) if first else (),
            live.truncation if first else None,
            live.selected if first or event.finish is not None else None,
            error=NO_MEMORY if event.finish == "no_memory" else None,
            missed=live.missed,
            waited=live.waited or 0.0,
        )
        if event.finish is None:
            self._outbox.append((live, output))
        else:
            self._finish(live, output)

    def _finish(self, live: _Live, output: Output) -> None:
        self._live.pop(live.job, None)
        self._runner.forget(live.job)
        if self._scores is not None:
            self._scores.end(live.job)
        self._leave_queue(live)
        self._aside.ended(live.request.id)
        if live.selected is not None and not live.deleted:
            rows = len(live.request.prompt) - live.selected.rows
            self._aside.add(live.request, max(1, rows), self._now())
        with self._lock:
            self._jobs.pop(live.request.id, None)
        self._totals.finished(output.finish_reason or "error")
        self._outbox.append((live, output))

    def _cancel(self, job: int) -> None:
        self._dispatch(self._scheduler.cancel(job, self._now()), None)

    def _leave_queue(self, live: _Live) -> None:
        if not live.admitted:
            live.admitted = True
            with self._lock:
                self._waiting -= 1

    def _stop(self, flush: bool) -> None:
        for job in list(self._live):
            self._cancel(job)
        self._flush_at_end = flush
        self._stopping = True

    def _settle(self) -> bool:
        """Iterate until the plan and the store are both at rest. False: the disk has not answered for long."""
        deadline = self._now() + DRAIN_SECONDS
        patience, moved = self._now() + ANSWER_SECONDS, self._moved
        while (now := self._now()) < min(deadline, patience):
            if self._iterate() or self._moved != moved:
                patience, moved = self._now() + ANSWER_SECONDS, self._moved
                continue
            if not self._live and self._store.at_rest():
                return True
            self._take_inbox(block=True, timeout=0.1)
        log.warning("the store was still busy after %.0f s", now - deadline + DRAIN_SECONDS)
        return False


def _nobody(output: Output) -> None:
    """The sink of a request whose outputs nobody waits for."""
