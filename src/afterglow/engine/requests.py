"""Check requests, turn them into jobs of the plan, and join outputs to completions.

Pure functions, which a caller's thread may call by itself.
"""

from __future__ import annotations

import hashlib
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from afterglow.config import EngineConfig
from afterglow.errors import RequestError
from afterglow.plan.prefix.ranges import Rows, ranges_of
from afterglow.plan.prefix.salts import salt_name
from afterglow.plan.prefix.shared_prefixes import OPERATOR
from afterglow.plan.prefix.truncation import Rules, refuse_discarding, refuse_uncuttable
from afterglow.plan.step import JobSpec
from afterglow.request import (
    MAX_BREAKPOINTS,
    Breakpoint,
    Completion,
    ContextWindow,
    Output,
    Request,
    SamplingParams,
)


def completion_of(outputs: Sequence[Output], ttft_s: float) -> Completion:
    """Join all outputs of a request.

    Raises: RequestError, if the request failed.
    """
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


def stop_tokens(sampling: SamplingParams, eos: frozenset[int]) -> frozenset[int]:
    """List the tokens that end a reply. The end of a grammar is one of the model's, also with `ignore_eos`."""
    ignored = sampling.ignore_eos and sampling.grammar is None
    return frozenset(sampling.stop_token_ids) | (frozenset() if ignored else eos)


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
    return array("I", tokens).tobytes()


def salt_id(salt: str) -> str:
    """Hash a salt to the name that the plan and the disk know, so that no tenant's secret is written anywhere."""
    _utf8(salt, "cache_salt")
    return salt_name(salt)


def owner_of(salt: str | None) -> str:
    """Name the salt of the plan under which a registered prefix's rows lie. None: the operator's."""
    return OPERATOR if salt is None else salt_id(salt)
