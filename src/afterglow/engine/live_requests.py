"""Follow requests from submit to their last output: ids, the length of the queue, and outputs for callers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from afterglow.engine.grammars.masks import Constraint
from afterglow.engine.stats import EngineCounters
from afterglow.engine.token_outputs import RunOutput
from afterglow.errors import RequestError
from afterglow.plan.prefix.truncation import Cut
from afterglow.plan.step import Admitted, Emitted, Event, JobSpec, Run
from afterglow.request import CachedTokens, Missed, Output, Request, Selected, TokenLogprob, Truncation

log = logging.getLogger("afterglow.engine")

Sink = Callable[[Output], None]

NO_MEMORY = (
    "the device has no memory left for this request; send a shorter prompt, or have the operator lower --device-cache or "
    "--prefill-chunk"
)


@dataclass(slots=True)
class LiveRequest:
    """Hold the state of a request between submit and its last output."""

    request: Request
    sink: Sink
    spec: JobSpec
    constraint: Constraint | None = None
    cut: Cut | None = None
    truncation: Truncation | None = None
    selected: Selected | None = None
    admitted: bool = False
    deleted: bool = False  # its conversation was deleted since it came
    cached: CachedTokens = CachedTokens()
    missed: Missed = Missed()
    arrived: float = field(default_factory=time.perf_counter)
    waited: float | None = None  # seconds until its first step
    generated: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.request.sampling.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)

    def prompt_rows(self, run: Run) -> int:
        """Count the rows of a run that belong to the prompt, not to the reply."""
        dropped = self.cut.dropped if self.cut is not None else 0
        return max(0, min(len(run.tokens), len(self.request.prompt) - dropped - run.start))


class LiveRequests:
    """Keep all live requests of an engine. Any thread may call `reserve` and `job_of`; the rest is for the engine's thread."""

    def __init__(self, max_queue: int, counters: EngineCounters, ended: Callable[[LiveRequest], None]) -> None:
        """`max_queue`: requests that may wait. `ended` is called with each request when its last output is made."""
        self.by_job: dict[int, LiveRequest] = {}
        self._max_queue = max_queue
        self._counters = counters
        self._ended = ended
        self._lock = threading.Lock()
        self._jobs: dict[str, int] = {}  # by request id
        self._next_job = 0
        self._waiting = 0  # submitted and not yet admitted, as callers see it
        self._outbox: list[tuple[LiveRequest, Output]] = []

    def reserve(self, request_id: str, aside: bool = False) -> int:
        """Take a place in the queue, and number the job. `aside`: a request of the engine's own finds a place where a caller's
        would, and takes none from callers.

        Raises: RequestError, where the queue is full or the id is in use.
        """
        with self._lock:
            if self._waiting >= self._max_queue:
                raise RequestError(
                    f"{self._waiting} requests are waiting already (--max-queue); try again later",
                    status=429,
                    code="queue_full",
                )
            if request_id in self._jobs:
                raise RequestError(f"request id {request_id!r} is in use", param="request_id")
            job = self._next_job
            self._next_job += 1
            self._jobs[request_id] = job
            self._waiting += not aside
        return job

    def job_of(self, request_id: str) -> int | None:
        """Find the job of a request; None if the request is not live."""
        with self._lock:
            return self._jobs.get(request_id)

    def take_in(self, events: Sequence[Event], out: RunOutput | None) -> None:
        """Turn the plan's events into outputs. `out`: the results of the step that the events come from."""
        for job, (start, found) in (out.prompt_logprobs if out else {}).items():
            known = self.by_job[job].prompt_logprobs
            del known[start + 1 :]  # a job that was sent back starts again
            known.extend(found)
        for job, selected in (out.selected if out else {}).items():
            self.by_job[job].selected = selected
        for event in events:
            live = self.by_job.get(event.job)
            if live is None:
                continue
            if isinstance(event, Admitted):
                self._admit(live, event)
            else:
                self._emit(live, event, out)

    def finish(self, live: LiveRequest, output: Output) -> None:
        """End a request with its last output."""
        self.by_job.pop(live.spec.job, None)
        self._leave_queue(live)
        self._ended(live)
        with self._lock:
            self._jobs.pop(live.request.id, None)
        if not live.spec.aside:
            self._counters.finished[output.finish_reason or "error"] += 1
        self._outbox.append((live, output))

    def fail(self, live: LiveRequest, error: str) -> None:
        """End a request with an error."""
        self.finish(live, Output(live.request.id, (), "error", error=error))

    @property
    def has_outputs(self) -> bool:
        """Tell whether outputs wait for `deliver`."""
        return bool(self._outbox)

    def deliver(self) -> list[int]:
        """Hand outputs to the callers' sinks. Returns jobs to cancel: their sinks have raised."""
        failed = []
        outbox, self._outbox = self._outbox, []
        for live, output in outbox:
            try:
                live.sink(output)
            except Exception:
                log.exception("the sink of request %s has failed: the request is cancelled", live.request.id)
                live.sink = no_sink
                failed.append(live.spec.job)
        return [job for job in failed if job in self.by_job]

    def _admit(self, live: LiveRequest, event: Admitted) -> None:
        live.cached = CachedTokens(event.device, event.host, event.disk, event.shared)
        # That another tenant has the tokens is counted, and never told.
        live.missed = Missed("cold" if event.why == "salt" else event.why, event.missed)
        if live.cut is not None:
            kept = len(live.request.prompt) - event.dropped
            live.truncation = Truncation(event.dropped, kept, event.embedded, live.cut.reason)
        self._leave_queue(live)
        if not live.spec.aside:
            self._counters.admitted(len(live.request.prompt), live.cached)

    def _emit(self, live: LiveRequest, event: Emitted, out: RunOutput | None) -> None:
        tokens = () if event.token is None else (event.token,)
        logprobs = out.logprobs.get(live.spec.job) if out and tokens else None  # of the step's tokens, in order
        first = live.generated == 0
        live.generated += len(tokens)
        self._counters.generation_tokens += len(tokens)
        output = Output(
            live.request.id,
            tokens,
            "error" if event.finish == "no_memory" else event.finish,
            live.cached,
            (logprobs.pop(0),) if logprobs else (),
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
            self.finish(live, output)

    def _leave_queue(self, live: LiveRequest) -> None:
        if not live.admitted:
            live.admitted = True
            with self._lock:
                self._waiting -= not live.spec.aside


def no_sink(output: Output) -> None:
    """Ignore an output: the sink of requests of the engine's own."""
