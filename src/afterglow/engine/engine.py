"""The engine: the only room that joins plan, store and model.

One thread owns the plan. It sleeps on one inbox, which callers (submit, cancel) and the mover (completions) fill.
Knows token ids only: text, HTTP and chat templates are outside.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from afterglow.config import EngineConfig, PreloadName, SourceName
from afterglow.engine.runner import Runner, RunOutput
from afterglow.engine.setup import Parts, build
from afterglow.engine.stats import EngineStats, Totals, collect
from afterglow.errors import RequestError
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import Admitted, Emitted, Event, JobSpec, Run, Step
from afterglow.plan.truncation import refuse_uncuttable
from afterglow.request import (
    CachedTokens,
    FinishReason,
    Output,
    Request,
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
DRAIN_SECONDS = 60.0  # how long closing waits for the disk


@dataclass(slots=True)
class _Live:
    """A request between submit and its last output."""

    job: int
    request: Request
    sink: Sink
    spec: JobSpec
    truncation: Truncation | None = None
    admitted: bool = False
    cached: CachedTokens = CachedTokens()
    generated: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole reply, as `Engine.generate` returns it. `ttft_s`: seconds from submit to the first token."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    cached: CachedTokens
    ttft_s: float
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...]


class Engine:
    """Submit requests, receive outputs. `Engine.load` builds one; `start` begins, `close` ends it."""

    def __init__(self, parts: Parts, config: EngineConfig) -> None:
        self.config = config
        self.model_dir = parts.model_dir
        self.model_name = parts.model_name
        self.max_model_len = parts.max_model_len
        self.capacity = parts.capacity
        self.vocab_size = parts.vocab_size
        self.conversations = parts.conversations  # responses that clients go on from by id
        self.eos_token_ids = parts.eos_token_ids
        self._eos = frozenset(parts.eos_token_ids)
        self._scheduler: Scheduler = parts.scheduler
        self._store: KVStore = parts.store
        self._runner: Runner = parts.runner
        self._parts = parts
        self._epoch = time.time() - time.monotonic()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._touched_at = 0.0
        self._store_failures = 0  # that have been told of
        parts.notify.target = self._wake
        self._woken = threading.Event()
        self._live: dict[int, _Live] = {}
        self._jobs: dict[str, int] = {}
        self._next_job = 0
        self._waiting = 0  # submitted and not yet admitted, as callers see it
        self._lock = threading.Lock()
        self._totals = Totals()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._stopping = False
        self._flush_at_end = True
        self._wake_at: float | None = None
        self._failure: BaseException | None = None

    @classmethod
    def load(
        cls,
        model: str | Path,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        throttle: Throttle | None = None,
    ) -> Engine:
        """Read a Hugging Face model directory (or a preset's name, `bench-100m`) and open its cache.

        `throttle` slows the disk tier down, for benchmarks.
        Errors: ModelError, ConfigError.
        """
        config = config or EngineConfig()
        return cls(build(model, config, progress, throttle), config)

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
        self._validate(request)
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
        live = _Live(job, request, sink, _spec(job, request, self.config, self._eos))
        if request.sampling.prompt_logprobs is not None:
            live.prompt_logprobs.append(None)
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
        return [_completion(gathered[r.id], first[r.id]) for r in requests]

    def stats(self) -> EngineStats:
        """A snapshot of counters and levels; never waits for the engine's thread."""
        parts = self._parts
        return collect(
            self._totals,
            self._scheduler.stats(),
            self._store.stats(),
            parts.capacity,
            parts.device_row_bytes,
            parts.host_block_bytes,
        )

    def reset_cache(self, salt: str | None = None) -> None:
        """Forget every cached row that no running request needs, in all tiers; of one tenant, or of all (None)."""
        tenant = _salt_id(salt) if salt is not None else None
        self._send(lambda: self._scheduler.reset(self._now(), tenant))

    def sessions(self, salt: str) -> list[SessionInfo]:
        """One tenant's conversations that have a name, the last used first."""
        found = self._ask(lambda: self._scheduler.sessions(_salt_id(salt)))
        return [SessionInfo(s.name, s.rows, s.device, s.host, s.disk, s.used, s.expires, s.pinned) for s in found]

    def pin_session(self, salt: str, name: str, pinned: bool) -> bool:
        """Keep a conversation in some tier whatever happens, or no longer. False: there is none of that name."""
        return self._ask(lambda: self._scheduler.pin_session(_salt_id(salt), name, pinned))

    def forget_session(self, salt: str, name: str) -> bool:
        """Remove a conversation and what only it has used from all tiers. False: there is none of that name."""
        return self._ask(lambda: self._scheduler.forget_session(_salt_id(salt), name))

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
        self._on_thread(self._settle)

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
        self._store.close()
        self.conversations.close()
        if self._parts.journal is not None:
            self._parts.journal.close()

    # --------------------------------------------------------------------------------- the engine's own thread

    def _validate(self, request: Request) -> None:
        if not request.prompt:
            raise RequestError("the prompt is empty", param="prompt")
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise RequestError(f"token id {bad} is outside the vocabulary of {self.vocab_size} tokens", param="prompt")
        n = len(request.prompt)
        if request.truncation and request.sampling.prompt_logprobs is not None:
            raise RequestError(
                "log-probabilities of a prompt need all of it: switch truncation off", param="truncation"
            )
        if request.truncation:
            refuse_uncuttable(self._scheduler.rules, n, request.sampling.max_tokens, request.turns)
        elif n + min(1, request.sampling.max_tokens) > self.max_model_len:
            raise RequestError(
                f"this model's context is {self.max_model_len} tokens, and the prompt alone has {n}; "
                "shorten it or start the server with a larger --max-model-len",
                param="prompt",
                code="context_length_exceeded",
            )

    def _send(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)

    def _wake(self) -> None:
        """From the mover's threads: a completion is waiting. Coalesced, so that the inbox cannot grow."""
        if not self._woken.is_set():
            self._woken.set()
            self._inbox.put(self._woken.clear)

    def _accept(self, live: _Live) -> None:
        self._live[live.job] = live
        try:
            self._runner.register(live.job, live.request)
            self._scheduler.submit(live.spec, self._now())
        except Exception as error:  # one request's fault must not be everybody's
            if not isinstance(error, RequestError):
                log.exception("a request could not be accepted")
            self._finish(live, Output(live.request.id, (), "error", error=str(error)))

    def _main(self) -> None:
        try:
            while not self._stopping:
                busy = self._iterate()
                self._take_inbox(block=not busy)
            self._settle()
            if self._flush_at_end:
                self._scheduler.flush(self._now())
                self._settle()
            self._remember()
        except BaseException as error:
            log.exception("the engine has stopped because of an error")
            self._failure = error
            for live in list(self._live.values()):
                self._finish(live, Output(live.request.id, (), "error", error="internal error"))

    def _take_inbox(self, block: bool, timeout: float | None = None) -> None:
        """Do what callers asked for; with `block`, wait for something first."""
        if block and timeout is None and self._wake_at is not None:
            timeout = max(0.0, self._wake_at - self._now())
        while True:
            try:
                action = self._inbox.get(block, timeout)
            except queue.Empty:
                return
            action()
            block = False

    def _iterate(self) -> bool:
        """One step; False when there is nothing to do until something arrives."""
        began = time.perf_counter()
        done = self._store.finished()
        if done:
            self._dispatch(self._scheduler.complete(done, self._now()), None)
        self._remember_use()
        step = self._scheduler.schedule(self._now())
        self._wake_at = step.wake_at
        if step.idle:
            return False
        self._execute(step, began)
        return True

    def _remember_use(self) -> None:
        """Now and then tell the catalog which extents were used, so that eviction knows after a restart."""
        now = self._now()
        if now - self._touched_at >= TOUCH_SECONDS:
            self._touched_at = now
            self._remember()

    def _remember(self) -> None:
        counters = self._scheduler.stats().counters
        failed, self._store_failures = counters.store_failures - self._store_failures, counters.store_failures
        if failed:
            log.warning("%d extents could not be written to disk: is it full, or read-only?", failed)
        self._store.touch(self._scheduler.take_touched())
        notes: dict[str, list[tuple[str, str | None]]] = {}
        for kind, key, value in self._scheduler.take_notes():
            notes.setdefault(kind, []).append((key, value))
        for kind, items in notes.items():
            self._store.note(kind, items)

    def _execute(self, step: Step, began: float) -> None:
        self._runner.release(step)
        self._store.start(step.moves)
        if step.urged:
            self._store.urge(step.urged)
            for move in step.urged:
                self._store.release(move)
        ran = time.perf_counter()
        out = self._runner.run(step)
        ended = time.perf_counter()
        prefilled = sum(self._prompt_rows(run) for run in step.runs)
        events = self._scheduler.commit(step, out.result, self._store.finished(), self._now())
        self._dispatch(events, out)
        self._totals.step(ran - began + time.perf_counter() - ended, ended - ran, prefilled)

    def _prompt_rows(self, run: Run) -> int:
        """Rows of a run that belong to the prompt, not to the reply."""
        live = self._live[run.job]
        dropped = live.truncation.dropped if live.truncation is not None else 0
        return max(0, min(len(run.tokens), len(live.request.prompt) - dropped - run.start))

    def _dispatch(self, events: Sequence[Event], out: RunOutput | None) -> None:
        for job, (start, found) in (out.prompt_logprobs if out else {}).items():
            known = self._live[job].prompt_logprobs
            del known[start + 1 :]  # a job that was sent back starts again
            known.extend(found)
        for event in events:
            live = self._live.get(event.job)
            if live is None:
                continue
            if isinstance(event, Admitted):
                live.cached = CachedTokens(event.device, event.host, event.disk)
                if event.dropped:
                    kept = len(live.request.prompt) - event.dropped
                    live.truncation = Truncation(event.dropped, kept, event.embedded)
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
            event.finish,
            live.cached,
            (logprob,) if logprob else (),
            tuple(live.prompt_logprobs) if first else (),
            live.truncation if first else None,
        )
        if event.finish is None:
            live.sink(output)
        else:
            self._finish(live, output)

    def _finish(self, live: _Live, output: Output) -> None:
        self._live.pop(live.job, None)
        self._runner.forget(live.job)
        self._leave_queue(live)
        with self._lock:
            self._jobs.pop(live.request.id, None)
        self._totals.finished(output.finish_reason or "error")
        live.sink(output)

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

    def _settle(self) -> None:
        """Iterate until the plan and the store are both at rest."""
        deadline = self._now() + DRAIN_SECONDS
        while self._now() < deadline:
            if self._iterate():
                continue
            if not self._live and self._store.at_rest():
                return
            self._take_inbox(block=True, timeout=0.1)
        log.warning("the store was still busy after %.0f s", DRAIN_SECONDS)


def _completion(outputs: Sequence[Output], ttft_s: float) -> Completion:
    last = outputs[-1]
    if last.finish_reason == "error":
        raise RequestError(last.error or "the request failed", status=500)
    assert last.finish_reason is not None
    return Completion(
        tokens=tuple(t for output in outputs for t in output.tokens),
        finish_reason=last.finish_reason,
        cached=last.cached,
        ttft_s=ttft_s,
        logprobs=tuple(lp for output in outputs for lp in output.logprobs),
        prompt_logprobs=outputs[0].prompt_logprobs,
    )


def _spec(job: int, request: Request, config: EngineConfig, eos: frozenset[int]) -> JobSpec:
    """A request as the plan sees it. Errors: RequestError for names that are no text."""
    sampling = request.sampling
    return JobSpec(
        job=job,
        prompt=_token_bytes(request.prompt),
        max_tokens=sampling.max_tokens,
        stop_tokens=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos),
        salt=_salt_id(request.salt),
        read=request.reuse and config.cache.reuse and sampling.prompt_logprobs is None,
        write=request.reuse and config.cache.reuse,
        priority=request.priority,
        session=request.session_id,
        ttl=request.ttl_s if request.ttl_s is not None else config.cache.ttl,
        truncation=request.truncation,
        turns=request.turns,
        tie=_tie(request.cache_key),
    )


def _tie(cache_key: str | None) -> int:
    """A number that is equal for equal keys, in any process."""
    if cache_key is None:
        return 0
    return int.from_bytes(hashlib.blake2b(_utf8(cache_key, "prompt_cache_key"), digest_size=6).digest(), "little")


def _utf8(text: str, param: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{param} is not valid Unicode: {error.reason}", param=param) from error


def _token_bytes(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def _salt_id(salt: str) -> str:
    """The salt as the plan and the disk know it: a digest, so that no tenant's secret is written anywhere."""
    return hashlib.sha256(_utf8(salt, "cache_salt")).hexdigest()[:32] if salt else ""
