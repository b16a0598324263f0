"""Requests on their way into the plan, and replies on their way out: checks, digests, whole completions.

No thread and no state: what a caller's thread may do by itself.
"""

from __future__ import annotations

import hashlib
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from afterglow.config import EngineConfig
from afterglow.errors import RequestError
from afterglow.plan.ranges import Rows, ranges_of
from afterglow.plan.salts import salt_name
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import JobSpec
from afterglow.plan.truncation import refuse_discarding, refuse_uncuttable
from afterglow.request import (
    CachedTokens,
    FinishReason,
    Missed,
    Output,
    Request,
    SamplingParams,
    Selected,
    TokenLogprob,
    Truncation,
)


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole reply, as `Engine.generate` returns it. `ttft_s`: seconds from submit to the first token."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    cached: CachedTokens
    ttft_s: float
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...]
    truncation: Truncation | None = None
    selected: Selected | None = None
    missed: Missed = Missed()


def completion_of(outputs: Sequence[Output], ttft_s: float) -> Completion:
    """All outputs of a request as one. Errors: RequestError if it failed."""
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
        truncation=outputs[0].truncation,
        selected=last.selected if last.selected is not None else outputs[0].selected,
        missed=last.missed,
    )


def check(request: Request, scheduler: Scheduler, vocab_size: int, max_model_len: int) -> None:
    """Errors: RequestError for a request that could never be answered. Reads nothing that changes."""
    if not request.prompt:
        raise RequestError("the prompt is empty", param="prompt")
    low, high = min(request.prompt), max(request.prompt)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(f"token id {bad} is outside the vocabulary of {vocab_size} tokens", param="prompt")
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
    if request.discard:
        if not request.truncation:
            raise RequestError("tokens can only be discarded with truncation switched on", param="discard")
        refuse_discarding(request.discard, n, request.turns, scheduler.relative)
    if request.truncation:
        refuse_uncuttable(scheduler.rules, n, request.sampling.max_tokens, request.turns)
    elif n + min(1, request.sampling.max_tokens) > max_model_len:
        raise RequestError(
            f"this model's context is {max_model_len} tokens, and the prompt alone has {n}; "
            "shorten it or start the server with a larger --max-model-len",
            param="prompt",
            code="context_length_exceeded",
        )


def discarding(
    context: Sequence[int],
    dropped: Sequence[int] | Sequence[Rows],
    system_rows: int,
    salt: str,
    session_id: str | None,
) -> Request:
    """A request that discards tokens of a context, and generates none. Errors: RequestError for a list that is empty,
    not ascending or outside of the context."""
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


def job_spec(job: int, request: Request, config: EngineConfig, eos: frozenset[int], salt: str) -> JobSpec:
    """A request as the plan sees it, under a salt of the plan's. Errors: RequestError for names that are no text."""
    sampling = request.sampling
    return JobSpec(
        job=job,
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
        selects=retention_of(request, config) < 1,
        renews=config.importance_renew > 0,
    )


def stop_tokens(sampling: SamplingParams, eos: frozenset[int]) -> frozenset[int]:
    """The tokens that end a reply."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos)


def retention_of(request: Request, config: EngineConfig) -> float:
    """The share of its cached prefix that a request attends to. Errors: RequestError where there is no choice."""
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
    """A number that is equal for equal keys, in any process."""
    if cache_key is None:
        return 0
    return int.from_bytes(hashlib.blake2b(_utf8(cache_key, "prompt_cache_key"), digest_size=6).digest(), "little")


def _utf8(text: str, param: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{param} is not valid Unicode: {error.reason}", param=param) from error


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as the plan has them: uint32, little-endian on all machines that this runs on."""
    return array("I", tokens).tobytes()


def salt_id(salt: str) -> str:
    """The salt as the plan and the disk know it: digests, so that no tenant's secret is written anywhere."""
    _utf8(salt, "cache_salt")
    return salt_name(salt)
