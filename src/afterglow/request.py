"""What a caller asks the engine for, and what comes back. Knows nothing of tokenizers, HTTP or caches."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal

from afterglow.errors import RequestError
from afterglow.field_types import need, refuse

FinishReason = Literal["stop", "length", "cancelled", "error"]
GrammarKind = Literal["json_schema", "regex", "choice", "grammar"]

MAX_LOGPROBS = 20
MAX_PENALTY = 2.0  # of presence and frequency, as OpenAI has it
MAX_BIAS = 100.0
MAX_BREAKPOINTS = 4  # of a prompt, as Anthropic has it
MAX_MARK_S = 86_400.0


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """The longest context of a model: `limit` tokens of prompt and reply. A prompt that is truncated leaves a part of
    the window, one in `reserve`, free for its reply."""

    limit: int
    reserve: int = 8

    def room(self, rows: int) -> int:
        """Count the tokens that a reply to a prompt of `rows` tokens may have."""
        return self.limit - rows

    def longest(self, max_tokens: int) -> int:
        """Count the tokens of the longest prompt beside which `max_tokens` of reply fit, or their reserved part."""
        return self.limit - max(min(max_tokens, self.limit // self.reserve), min(1, max_tokens))

    def fits(self, rows: int, max_tokens: int) -> bool:
        """Check whether a prompt need not be truncated for a reply of `max_tokens`."""
        return rows <= self.longest(max_tokens)

    def refuse(self, rows: int, max_tokens: int = 1, *, param: str = "prompt") -> None:
        """Refuse a prompt that leaves no room for one token, where a reply of `max_tokens` has any. Raises: RequestError."""
        if rows + min(1, max_tokens) > self.limit:
            raise self.error(f"the prompt has {rows} tokens", param)

    def error(self, found: str, param: str) -> RequestError:
        """Make the error for a request that is too long: `found` says by how much."""
        said = f"this model's maximum context length is {self.limit} tokens, but {found}"
        return RequestError(said, param=param, code="context_length_exceeded")


@dataclass(frozen=True, slots=True)
class Grammar:
    """Say which texts a reply may be: no token is drawn that cannot lead to one of them, and no stop token before its end.

    `kind` and `text`: a JSON schema, as JSON (`{"type": "object"}` is JSON mode); a regular expression of the whole reply; a
    list of texts to choose from, as JSON; or a context-free grammar, as Lark or GBNF. `compact`: JSON without white space
    between its tokens. `param`: the field of the request that it came from, for errors. `before`: what may stand before such a
    text, which is then named `@answer` in it: a grammar, as Lark. `lenient`: keywords of a schema that cannot be enforced are
    ignored.
    """

    kind: GrammarKind
    text: str
    compact: bool = False
    param: str = field(default="grammar", compare=False)
    before: str = ""
    lenient: bool = False

    def __post_init__(self) -> None:
        need(self, str, "text", "kind", "text", "before")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Set how tokens are drawn. `temperature == 0` is greedy.

    `stop_token_ids` end the reply and are not part of its text. Stop *strings* are above the engine, which knows no text: the
    caller looks for them and cancels the request (`Engine.cancel`).
    `presence_penalty` is subtracted from the logit of each token that was generated before, `frequency_penalty` once for each
    time. `repetition_penalty` divides the logits above 0, and multiplies the others, of all tokens in the prompt or
    generated before; 1 has no effect. `logit_bias` is added to the logits of token ids. Before `min_tokens` tokens are generated no
    stop token is drawn, and callers look for no stop string.
    `grammar`: what the reply must look like. The end of the grammar ends the reply, also before `min_tokens` and with
    `ignore_eos`; `max_tokens` may end it earlier.
    `logprobs`: number of alternatives per generated token; None: no log-probabilities at all. They are the model's own: before
    penalties, bias, temperature and filters, over the tokens that the grammar permits.
    `prompt_logprobs`: the same for prompt tokens. Every prompt row has to be computed, so reuse is off.
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
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, wanted: str) -> None:
            if not ok:
                raise RequestError(f"{name} must be {wanted}, got {getattr(self, name)!r}", param=name)

        need(self, Integral, "a whole number", "max_tokens", "top_k", "min_tokens")
        need(self, (Integral, type(None)), "a whole number, or None", "seed", "logprobs", "prompt_logprobs")
        penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        need(self, Real, "a number", "temperature", "top_p", "min_p", *penalties)
        need(self, (Grammar, type(None)), "a Grammar, or None", "grammar")
        need(self, Mapping, "a mapping of token ids to numbers", "logit_bias")
        need(self, bool, "True or False", "ignore_eos")
        need(self, Collection, "token ids", "stop_token_ids")
        check(all(isinstance(token, Integral) for token in self.stop_token_ids), "stop_token_ids", "token ids")
        check(0 <= self.max_tokens < 2**31, "max_tokens", "0 or more, and below 2^31")
        check(0 <= self.temperature <= 100, "temperature", "between 0 and 100")
        check(0 < self.top_p <= 1, "top_p", "greater than 0 and at most 1")
        check(-1 <= self.top_k < 2**31, "top_k", "-1 or 0 (off) or a positive number below 2^31")
        check(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        for name in ("presence_penalty", "frequency_penalty"):
            check(abs(getattr(self, name)) <= MAX_PENALTY, name, f"between {-MAX_PENALTY:g} and {MAX_PENALTY:g}")
        penalty = self.repetition_penalty
        check(0 < penalty < math.inf, "repetition_penalty", "greater than 0 (1 is none), and finite")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, Integral) or not isinstance(bias, Real) or not abs(bias) <= MAX_BIAS:
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


def stop_tokens(sampling: SamplingParams, eos: frozenset[int]) -> frozenset[int]:
    """List the tokens that end a reply. The end of a grammar is one of the model's, also with `ignore_eos`."""
    ignored = sampling.ignore_eos and sampling.grammar is None
    return frozenset(sampling.stop_token_ids) | (frozenset() if ignored else eos)


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Marks the first `rows` tokens of a prompt: others are going to begin with them. Their KV is kept before unmarked KV for
    `ttl_s` seconds after the last use of the breakpoint, within the tenant's share of the cache."""

    rows: int
    ttl_s: float = 300.0

    def __post_init__(self) -> None:
        need(self, Integral, "a whole number", "rows")
        need(self, Real, "a number", "ttl_s")
        if self.rows < 1:
            raise RequestError(f"a breakpoint comes after 1 row or more, got {self.rows}", param="breakpoints")
        if not 0 < self.ttl_s <= MAX_MARK_S:
            said = f"a breakpoint lives for more than 0 and at most {MAX_MARK_S:.0f} seconds, got {self.ttl_s:g}"
            raise RequestError(said, param="breakpoints")


@dataclass(frozen=True, slots=True)
class Request:
    """Asks for one turn, as token ids. KV is only ever shared under equal salts.

    `salt`: TENANT/SALT. Quota, pins and prompts are counted for the tenant; a salt without a slash is a tenant by itself.
    """

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
    kv_retention: float | None = None  # attend to this share of the cached prefix (SPEC); None: the engine's default
    reuse: bool = True  # False: neither read nor write any cache (benchmarks, A/B demos)
    breakpoints: tuple[Breakpoint, ...] = ()  # ends of beginnings that are worth keeping, in ascending order

    def __post_init__(self) -> None:
        need(self, str, "text", "id", "salt")
        need(self, (str, type(None)), "text, or None", "session_id", "cache_key")
        need(self, Sequence, "a sequence", "prompt", "turns", "discard", "breakpoints")
        need(self, SamplingParams, "a SamplingParams", "sampling")
        need(self, Integral, "a whole number", "priority")
        need(self, (int, float, type(None)), "a number, or None", "ttl_s", "kv_retention")
        need(self, bool, "True or False", "volatile", "truncation", "reuse")
        if isinstance(self.prompt, str | bytes):
            refuse("prompt", "token ids", self.prompt)
        if not all(isinstance(row, Integral) for row in self.turns):
            refuse("turns", "numbers of rows", self.turns)
        for rows in self.discard:
            if not (isinstance(rows, Sequence) and len(rows) == 2 and all(isinstance(row, Integral) for row in rows)):
                refuse("discard", "pairs of rows, where each begins and ends", self.discard)
        if not all(isinstance(each, Breakpoint) for each in self.breakpoints):
            refuse("breakpoints", "of Breakpoint", self.breakpoints)
        if self.ttl_s is not None and not self.ttl_s >= 0:
            raise RequestError(f"ttl_s must be 0 or more, got {self.ttl_s!r}", param="ttl_s")


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
    shared: int = 0  # came from other engines

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk + self.shared

    def __add__(self, more: CachedTokens) -> CachedTokens:
        counts = (self.device + more.device, self.host + more.host, self.disk + more.disk, self.shared + more.shared)
        return CachedTokens(*counts)

    def by_tier(self, shared: bool = True) -> dict[str, int]:
        """Count the tokens by the names of the tiers. `shared`: that tier is one of them."""
        found = {"device": self.device, "host": self.host, "disk": self.disk}
        return found | {"shared": self.shared} if shared else found


@dataclass(frozen=True, slots=True)
class Missed:
    """Counts prompt tokens that were not in the cache, and says why that end of the prompt was not: `cold` (never asked
    before, or only by another tenant), `evicted`, `expired`, `damaged`, `deleted`."""

    reason: str = "cold"
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Truncation:
    """Says that `dropped` tokens of a prompt were left out, so that `kept` remained. `reused`: the rest's KV was
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


@dataclass(slots=True)
class ToolCall:
    """A call that a model made. `arguments`: JSON, as the model wrote it; it may be malformed, or cut short."""

    id: str
    name: str
    arguments: str = ""
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A new part of a call's arguments. `first`: the call begins here; `index` counts the calls of a reply."""

    index: int
    call: ToolCall
    arguments: str
    first: bool


Part = Content | Reasoning | CallDelta


@dataclass(frozen=True, slots=True)
class Output:
    """What one engine step brought for one request.

    `tokens` are the new tokens of this step (stop tokens included), `finish_reason` is set on the last output. `cached` and `missed`
    are known from the first output on, as are the seconds it `waited` between its arrival and its first step. `error`: why the engine
    gave the request up; `param`: the request's field that is to blame, if one is. `text` and `parts` (content, calls, and the reasoning
    before) are empty where an engine without a tokenizer replied (see `Assembler`); `text` also where the end may be an unfinished
    character, or the beginning of a stop string.
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
    text: str = ""
    parts: tuple[Part, ...] = ()
    param: str | None = None

    def failure(self) -> RequestError:
        """Make the error of a request that the engine gave up."""
        status, code = (500, None) if self.param is None else (400, "invalid_grammar")
        return RequestError(self.error or "the request failed", status=status, param=self.param, code=code)


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole reply. `ttft_s`: seconds from submit to its first token.

    `tokens` include a stop token that ended the reply, which is no part of `text`. `text` is empty where an engine
    without a tokenizer replied. `reasoning`: what the model wrote for itself before its answer in a chat, which is no part
    of `text` either.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    cached: CachedTokens
    ttft_s: float
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...]
    truncation: Truncation | None = None
    selected: Selected | None = None
    missed: Missed = Missed()
    text: str = ""
    reasoning: str = ""


def completion_of(outputs: Sequence[Output], ttft_s: float) -> Completion:
    """Join all outputs of a request.

    Raises: RequestError, if the request failed.
    """
    last = outputs[-1]
    if last.finish_reason == "error":
        raise last.failure()
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
