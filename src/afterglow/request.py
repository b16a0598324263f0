"""What a caller asks the engine for, and what comes back. Knows nothing of tokenizers, HTTP or caches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from afterglow.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_LOGPROBS = 20
MAX_PENALTY = 2.0  # of presence and frequency, as OpenAI has it
MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature == 0` is greedy.

    `stop_token_ids` end the reply and are not part of its text; stop *strings* are the caller's business (text
    is outside of the engine) and reach it as `Engine.stop(job_id, ...)`.
    `presence_penalty` is taken from the logit of each token that was generated before, `frequency_penalty` once for each
    time. `repetition_penalty` divides the logits above 0, and multiplies the others, of all tokens in the prompt or
    generated before; 1 is none. `logit_bias`: what to add to the logit of a token id. Before `min_tokens` were generated no
    stop token is drawn, and callers look for no stop string.
    `logprobs`: number of alternatives per generated token, None for no log-probabilities at all. They are the model's own:
    before penalties, bias, temperature and filters.
    `prompt_logprobs`: the same for prompt tokens (needs every prompt row computed; switches reuse off).
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, wanted: str) -> None:
            if not ok:
                raise RequestError(f"{name} must be {wanted}, got {getattr(self, name)!r}", param=name)

        check(0 <= self.max_tokens < 2**31, "max_tokens", "0 or more, and below 2^31")
        check(math.isfinite(self.temperature) and 0 <= self.temperature <= 100, "temperature", "between 0 and 100")
        check(0 < self.top_p <= 1, "top_p", "greater than 0 and at most 1")
        check(-1 <= self.top_k < 2**31, "top_k", "-1 or 0 (off) or a positive number below 2^31")
        check(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        for name in ("presence_penalty", "frequency_penalty"):
            check(abs(getattr(self, name)) <= MAX_PENALTY, name, f"between {-MAX_PENALTY:g} and {MAX_PENALTY:g}")
        penalty = self.repetition_penalty
        check(0 < penalty < math.inf, "repetition_penalty", "greater than 0 (1 is none), and finite")
        for token, bias in self.logit_bias.items():
            if not abs(bias) <= MAX_BIAS:
                raise RequestError(
                    f"logit_bias must be between {-MAX_BIAS:g} and {MAX_BIAS:g}, got {bias!r} for token {token}",
                    param="logit_bias",
                )
        check(self.min_tokens >= 0, "min_tokens", "0 or more")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most the {self.max_tokens} tokens that the reply may have, got {self.min_tokens}",
                param="min_tokens",
            )
        check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(value is None or 0 <= value <= MAX_LOGPROBS, name, f"between 0 and {MAX_LOGPROBS}")


@dataclass(frozen=True, slots=True)
class Request:
    """One turn, as token ids. KV is only ever shared under equal salts. `salt`: TENANT/SALT, of which the tenant is whose
    quota, pins and prompts it counts among; without a slash it is a tenant by itself."""

    id: str
    prompt: tuple[int, ...] | list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    salt: str = ""
    session_id: str | None = None  # names the conversation: one turn at a time, listings, pins, deletion
    priority: int = 0  # lower is served first
    cache_key: str | None = None  # of jobs that arrive together, those with equal keys are served side by side
    ttl_s: float | None = None  # seconds that its KV is kept after the last use; None: the engine's default
    volatile: bool = False  # its KV stays in memory, and is not written to disk unless another request needs it there
    truncation: bool = False  # drop the oldest turns where the prompt does not fit, and keep the KV of the rest
    turns: tuple[int, ...] = ()  # prompt rows at which turns end; the first one is the end of the system prompt
    discard: tuple[tuple[int, int], ...] = ()  # prompt rows [start, stop) to leave out from now on; needs `truncation`
    kv_retention: float | None = (
        None  # attend to this share of the cached prefix only (SPEC); None: the engine's default
    )
    reuse: bool = True  # False: neither read nor write any cache (benchmarks, A/B demos)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one token, its rank (1 is the most likely), and the best alternatives."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that were not prefilled, by the tier they were in when the job was scheduled."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


@dataclass(frozen=True, slots=True)
class Missed:
    """Prompt tokens that were not in the cache, and why their end of the prompt was not: `cold` (nobody has asked so before,
    or only another tenant), `evicted`, `expired`, `damaged`, `deleted`."""

    reason: str = "cold"
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Truncation:
    """What was left out of a prompt: `dropped` of its tokens, so that `kept` remained. `reused`: the rest's KV was
    kept and embedded at new positions (CachedAttention §3.4); False: it had to be recomputed. `policy` chose the tokens;
    it is not the one that was configured where that one lacked scores, and `discard` where a caller gave a list."""

    dropped: int
    kept: int
    reused: bool
    policy: str = "oldest"


@dataclass(frozen=True, slots=True)
class Selected:
    """Of `rows` cached rows the request attended to `kept` (mean over layers; with a set for each head, those of one head):
    its answer is an approximation (SPEC). In `fallbacks` of `layers` layers the probe heads disagreed, the last time they were
    asked; `renewals`: how often tokens of the reply were asked, `taken`: rows that some head attended to at some time (mean over
    layers). The last output of a request has the last word."""

    rows: int
    kept: float
    layers: int
    fallbacks: int
    taken: float
    renewals: int


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One conversation in the cache. `tokens`: rows known of it; the tiers count rows where they are fastest to reach."""

    name: str
    tokens: int
    device: int
    host: int
    disk: int
    last_used: float  # seconds since 1970
    expires: float | None
    pinned: bool


@dataclass(frozen=True, slots=True)
class PrefixInfo:
    """A registered prefix: its tokens, and how many of them are in each tier (they are kept in all). `shared`: it is the
    operator's, for all tenants. `cached`: of its tokens, those that need not be computed when it was registered. `about`:
    what was to be remembered with it."""

    name: str
    tokens: int
    device: int
    host: int
    disk: int
    shared: bool
    cached: int = 0
    about: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """What one engine step brought for one request.

    `tokens` are the new tokens of this step (stop tokens included), `finish_reason` is set on the last output.
    `cached` and `missed` are known from the first output on, as are the seconds it `waited` between its arrival and its
    first step; `top2_gap` is the logit gap between the best two candidates of
    the last token (for honest comparisons of greedy runs), only when log-probabilities were asked for.
    """

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached: CachedTokens = CachedTokens()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    truncation: Truncation | None = None
    selected: Selected | None = None
    error: str | None = None
    missed: Missed = Missed()
    waited: float = 0.0
