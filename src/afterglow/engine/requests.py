"""Follow requests from submit to their last output: checks, jobs of the plan, ids, the length of the queue, and outputs for callers.

The functions are pure: a caller's thread may call them by itself.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from afterglow.config import EngineConfig
from afterglow.errors import RequestError
from afterglow.field_types import packed
from afterglow.plan.prefix.ranges import Rows, ranges_of
from afterglow.plan.prefix.salts import salt_name
from afterglow.plan.prefix.shared_prefixes import OPERATOR
from afterglow.plan.prefix.truncation import Cut, Rules, refuse_discarding, refuse_uncuttable
from afterglow.plan.step import Admitted, Emitted, Event, JobSpec, Run
from afterglow.request import (
    MAX_BREAKPOINTS,
    Breakpoint,
    CachedTokens,
    ContextWindow,
    Missed,
    Output,
    Request,
    SamplingParams,
    Selected,
    TokenLogprob,
    Truncation,
    stop_tokens,
)

if TYPE_CHECKING:  # these import torch
    from afterglow.engine.grammars.masks import Constraint
    from afterglow.engine.stats import EngineCounters
    from afterglow.engine.token_outputs import RunOutput

log = logging.getLogger("afterglow.engine")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Hold what a request must keep to. These are constants: callers' threads read them, but nothing of the plan.

    `rules`: how prompts are truncated. `relative_positions`: can rows move to other positions?
    """

    vocab_size: int
    max_model_len: int
    rules: Rules
    relative_positions: bool


def check(request: Request, limits: RequestLimits) -> None:
    """Refuse a request that could never be answered.

    Raises: RequestError.
    """
    vocab_size = limits.vocab_size
    if not request.prompt:
        raise RequestError("the prompt is empty", param="prompt")
    if (highest := int(np.frombuffer(packed(request.prompt), np.uint32).max())) >= vocab_size:
        raise RequestError(f"token id {highest} is outside the vocabulary of {vocab_size} tokens", param="prompt")
    for token in request.sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"logit_bias: token id {token} is outside the vocabulary of {vocab_size} tokens", param="logit_bias"
            )
    n = len(request.prompt)
    if request.truncation and request.sampling.prompt_logprobs is not None:
        raise RequestError("log-probabilities of a prompt need all of it: switch truncation off", param="truncation")
    if request.kv_retention is not None and not 0 < request.kv_retention <= 1:
        raise RequestError(
            f"kv_retention is the share of the cached prefix to attend to, more than 0 and at most 1, got "
            f"{request.kv_retention:g}",
            param="kv_retention",
        )
    _check_breakpoints(request.breakpoints, n)
    if request.discard:
        if not request.truncation:
            raise RequestError("tokens can only be discarded with truncation switched on", param="discard")
        refuse_discarding(request.discard, n, request.turns, limits.relative_positions)
    if request.truncation:
        refuse_uncuttable(limits.rules, n, request.sampling.max_tokens, request.turns)
    else:
        ContextWindow(limits.max_model_len).refuse(n, request.sampling.max_tokens)


def can_be_computed(request: Request, limits: RequestLimits) -> bool:
    """Tell whether the rows of a request's prompt can be computed without a reply."""
    try:
        check(replace(request, sampling=SamplingParams(max_tokens=0)), limits)
    except RequestError:
        return False
    return True


def _check_breakpoints(breakpoints: Sequence[Breakpoint], rows: int) -> None:
    """Refuse breakpoints that are too many, out of order, or beyond the prompt. Raises: RequestError."""
    if len(breakpoints) > MAX_BREAKPOINTS:
        raise RequestError(
            f"a prompt may have {MAX_BREAKPOINTS} breakpoints, got {len(breakpoints)}", param="breakpoints"
        )
    ends = [each.rows for each in breakpoints]
    if any(later <= earlier for earlier, later in zip(ends, ends[1:], strict=False)) or (ends and ends[-1] > rows):
        raise RequestError(
            f"breakpoints must be in ascending order, and within the {rows} tokens of the prompt, got {ends}",
            param="breakpoints",
        )


def discarding(
    context: Sequence[int],
    dropped: Sequence[int] | Sequence[Rows],
    system_rows: int,
    salt: str,
    session_id: str | None,
) -> Request:
    """Make a request that discards tokens of a context, and generates none.

    Raises: RequestError, for a list that is empty, not ascending, or outside of the context.
    """
    if not dropped:
        raise RequestError("there is nothing to discard: the list is empty", param="discard")
    if isinstance(dropped[0], int):
        ranges = ranges_of(cast(Sequence[int], dropped), len(context))
    else:
        ranges = tuple((start, stop) for start, stop in cast(Sequence[Rows], dropped))
    return Request(
        f"discard-{uuid.uuid4().hex}",
        list(context),
        SamplingParams(max_tokens=0),
        salt=salt,
        session_id=session_id,
        truncation=True,
        turns=(system_rows,) if system_rows else (),
        discard=ranges,
    )


def job_spec(request: Request, config: EngineConfig, eos: frozenset[int], salt: str) -> JobSpec:
    """Turn a request into a job of the plan, under a salt of the plan's. It is numbered when it has a place in the queue.

    Raises: RequestError, for names that are not valid Unicode, and for a share of the cached prefix that cannot be had.
    """
    sampling = request.sampling
    return JobSpec(
        job=0,
        prompt=token_bytes(request.prompt),
        max_tokens=sampling.max_tokens,
        stop_tokens=stop_tokens(sampling, eos),
        salt=salt,
        read=request.reuse and config.cache.reuse and sampling.prompt_logprobs is None,
        write=request.reuse and config.cache.reuse,
        priority=request.priority,
        session=request.session_id,
        ttl=request.ttl_s if request.ttl_s is not None else config.cache.ttl,
        volatile=request.volatile,
        truncation=request.truncation,
        turns=request.turns,
        discard=request.discard,
        tie=_tie(request.cache_key),
        selects=(retention := retention_of(request, config)) < 1,
        retention=retention,
        renews=config.importance_renew > 0,
        breakpoints=request.breakpoints if request.reuse and config.cache.reuse else (),
    )


def retention_of(request: Request, config: EngineConfig) -> float:
    """Choose the share of the cached prefix that a request attends to.

    Raises: RequestError, where the server does not let requests choose.
    """
    if config.importance is None and request.kv_retention is not None and request.kv_retention < 1:
        raise RequestError(
            f"kv_retention {request.kv_retention:g} was asked for, and this server keeps no importance of tokens; start it "
            "with --importance 1 to let requests choose",
            param="kv_retention",
        )
    if config.importance is None or not request.reuse:
        return 1.0
    return config.importance if request.kv_retention is None else request.kv_retention


def _tie(cache_key: str | None) -> int:
    """Hash a cache key to a number, the same in every process."""
    if cache_key is None:
        return 0
    return int.from_bytes(hashlib.blake2b(_utf8(cache_key, "prompt_cache_key"), digest_size=6).digest(), "little")


def _utf8(text: str, param: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{param} is not valid Unicode: {error.reason}", param=param) from error


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Pack token ids as the plan has them: uint32, little-endian on all supported machines."""
    return packed(tokens).tobytes()


def salt_id(salt: str) -> str:
    """Hash a salt to the name that the plan and the disk know, so that no tenant's secret is written anywhere."""
    _utf8(salt, "cache_salt")
    return salt_name(salt)


def owner_of(salt: str | None) -> str:
    """Name the salt of the plan under which a registered prefix's rows lie. None: the operator's."""
    return OPERATOR if salt is None else salt_id(salt)


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
            if (live := self.by_job.get(job)) is not None:  # a reply that broke has ended
                del live.prompt_logprobs[start + 1 :]  # a job that was sent back starts again
                live.prompt_logprobs.extend(found)
        for job, selected in (out.selected if out else {}).items():
            if (live := self.by_job.get(job)) is not None:
                live.selected = selected
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

    def fail(self, live: LiveRequest, error: str, param: str | None = None) -> None:
        """End a request with an error; `param`: the request's field that is to blame."""
        self.finish(live, Output(live.request.id, (), "error", error=error, param=param))

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
