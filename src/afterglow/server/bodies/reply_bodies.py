"""Bodies of requests for replies, and how they become sampling parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel

from afterglow.errors import RequestError
from afterglow.library.sampling_defaults import SamplingDefaults
from afterglow.request import MAX_LOGPROBS, Grammar, SamplingParams
from afterglow.server.bodies.grammar_fields import GrammarFields, read_format
from afterglow.server.bodies.json_body import (
    NOT_SUPPORTED,
    Int,
    Name,
    Unused,
    at_most,
    check_effort,
    check_session,
    check_variables,
    read_begun,
    with_effort,
)
from afterglow.server.bodies.limits import (
    MAX_NAME,
    MAX_VALUES,
    check_chars,
    check_messages,
    read_prompts,
    unsupported,
    wrong,
)
from afterglow.server.bodies.response_items import read_input
from afterglow.server.bodies.tool_fields import read_tool_use
from afterglow.text.chat_template import shown

MAX_CHOICES = 128
MAX_STOPS = 64
PRIORITIES = 100  # above and below 0
LONGEST_TTL_S = 10 * 365 * 24 * 3600.0
RETENTIONS = {"in_memory": 3600.0, "24h": 24 * 3600.0}  # OpenAI keeps KV in memory for an hour at most


OF_REPLIES: Unused = {  # what would change a reply, and is not supported
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([], ""),
    "chat_template": ("",),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "dry_multiplier": (0,),
    "grammar": ("",),
    "json_schema": ({},),
    "logits_processors": ([], {}),
    "mirostat": (0,),
    "n_probs": (0,),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "top_a": (0,),
    "truncate_prompt_tokens": (-1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
}


UNUSED_VERBOSITY = ("medium", None)  # templates of models know no other


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(GrammarFields):
    """The base of bodies that ask for replies."""

    unsupported: ClassVar[Unused] = {}
    prompt_field: ClassVar[str]
    default_tokens: ClassVar[int | None] = None  # of a reply, where the request gives no limit
    clamped: ClassVar[bool] = False  # the context may end the reply before its limit; otherwise such a limit is refused

    model: Name | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, at_most(MAX_NAME)] = None
    min_tokens: Int | None = None
    seed: Int | None = None
    stop: Annotated[Name | list[Name] | None, at_most(MAX_NAME)] = None
    stop_token_ids: Annotated[list[Int] | None, at_most(MAX_NAME)] = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool | None = False
    ignore_eos: bool = False
    cache_salt: Name | None = None
    session_id: str | None = None
    priority: Int | None = 0
    kv_retention: float | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Any = None
    user: Name | None = None

    @classmethod
    def refused(cls) -> Unused:
        refused = {**NOT_SUPPORTED, **OF_REPLIES, **cls.unsupported}
        return {name: unused for name, unused in refused.items() if name not in cls.model_fields}

    def check(self) -> None:
        super().check()
        for name in ("cache_salt", "prompt_cache_key"):
            if getattr(self, name) == "":
                raise RequestError(f"{name} must be a non-empty string; leave it out for none", param=name)
        check_session(self.session_id)
        if not -PRIORITIES <= (self.priority or 0) <= PRIORITIES:
            wanted = f"must lie between {-PRIORITIES} and {PRIORITIES} (lower is served first)"
            raise wrong("priority", wanted, self.priority)
        if len(self.stops) > MAX_STOPS or not all(self.stops):
            raise RequestError(f"stop must be at most {MAX_STOPS} non-empty strings", param="stop")
        _ = self.ttl_s

    @property
    @abstractmethod
    def reply_tokens(self) -> int | None:
        """Return the most tokens of a reply; None where the request gives no limit."""

    @property
    def tokens_field(self) -> str:
        """Return the name of the field that gives the limit."""
        return "max_tokens"

    @property
    def replies_per_prompt(self) -> int:
        """Return the number of replies to each prompt."""
        return 1

    @property
    def continues(self) -> bool:
        """Tell whether the last message is the beginning of the reply."""
        return False

    @property
    def stops(self) -> list[str]:
        """Return the stop strings."""
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])

    @property
    def biases(self) -> dict[int, float]:
        """Return `logit_bias` by token id: JSON's keys are strings. Raises: RequestError."""
        found = {}
        for key, bias in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdecimal() and len(key) < 20 and str(int(key)) == key):
                raise RequestError(
                    f"logit_bias: the keys must be token ids, as decimal strings, got {shown(key)}", param="logit_bias"
                )
            found[int(key)] = bias
        return found

    @property
    def ttl_s(self) -> float | None:
        """Return the seconds of `prompt_cache_retention`. Raises: RequestError."""
        value = self.prompt_cache_retention
        if value is None:
            return None
        if isinstance(value, str) and value in RETENTIONS:
            return RETENTIONS[value]
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_TTL_S:
            return float(value)
        wanted = f"must be 'in_memory', '24h', or a number of seconds (up to {LONGEST_TTL_S:.0f})"
        raise wrong("prompt_cache_retention", wanted, value)

    @property
    def volatile(self) -> bool:
        """Check whether KV must stay off the disk: OpenAI holds "in_memory" in volatile memory only."""
        return bool(self.prompt_cache_retention == "in_memory")

    def sampling(self, defaults: SamplingDefaults, max_tokens: int, logprobs: Int | None) -> SamplingParams:
        """Combine the fields of the body with the defaults. Raises: RequestError."""

        def pick(name: str) -> Any:
            value = getattr(self, name)
            return getattr(defaults, name) if value is None else value

        return SamplingParams(
            max_tokens=max_tokens,
            temperature=pick("temperature"),
            top_p=pick("top_p"),
            top_k=pick("top_k"),
            min_p=pick("min_p"),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=pick("repetition_penalty"),
            logit_bias=self.biases,
            min_tokens=self.min_tokens or 0,
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            grammar=self.grammar,
        )


class ChoicesBody(Body):
    """The base of the bodies of `/v1/completions` and `/v1/chat/completions`."""

    stream_options: StreamOptions | None = None
    n: Int | None = 1
    best_of: Int | None = None
    max_tokens: Int | None = None
    response_format: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            raise wrong("n", f"must be between 1 and {MAX_CHOICES}", self.n)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise wrong("best_of", f"must equal n ({self.n or 1})", self.best_of)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for stream: true", param="stream_options")

    def formats(self) -> list[Grammar]:
        return read_format(self.response_format, "response_format")

    @property
    def reply_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def replies_per_prompt(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionBody(ChoicesBody):
    """`/v1/completions`."""

    unsupported: ClassVar[Unused] = {  # a text has no turns, and calls no tools
        "truncation": ("disabled",),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
    }
    most_values = MAX_VALUES
    prompt_field = "prompt"
    default_tokens = 16  # as in OpenAI's API

    prompt: Any = None  # once it is checked, a list of texts or of lists of token ids
    echo: bool | None = False
    logprobs: Int | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        super().check()
        self.prompt = read_prompts(self.prompt)


class ChatBody(ChoicesBody):
    """`/v1/chat/completions`."""

    unsupported: ClassVar[Unused] = {"echo": (False,), "verbosity": UNUSED_VERBOSITY}
    prompt_field = "messages"

    messages: Any = None
    truncation: Literal["auto", "disabled"] | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = False
    top_logprobs: Int | None = None
    reasoning_effort: Name | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def continues(self) -> bool:
        return bool(self.continue_final_message)

    @property
    def template_variables(self) -> Mapping[str, object] | None:
        """Return the variables of the chat template that the request sets."""
        return with_effort(self.reasoning_effort, self.enable_thinking, self.chat_template_kwargs)

    @property
    def reply_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def check(self) -> None:
        super().check()
        self._tool_use = read_tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        self._size = check_messages(self.messages) + self._tool_use.size + check_variables(self.chat_template_kwargs)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise wrong("top_logprobs", f"must be between 0 and {MAX_LOGPROBS}", self.top_logprobs)
        check_effort(self.reasoning_effort, "reasoning_effort")
        self.messages, self.continue_final_message = read_begun(
            self.messages, self.continue_final_message, self.add_generation_prompt
        )
        if self.add_generation_prompt is False and not self.continues:
            raise unsupported("add_generation_prompt")


class ResponseBody(Body):
    """`/v1/responses`."""

    unsupported: ClassVar[Unused] = {
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "context_management": ([],),
        "max_tool_calls": (),
        "top_logprobs": (0,),
    }
    prompt_field = "input"

    input: Any = None  # once it is checked, a list of items
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: bool | None = True
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: Int | None = None
    metadata: Annotated[dict[str, str] | None, at_most(16)] = None
    include: Annotated[list[Name] | None, at_most(64)] = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def reply_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def tokens_field(self) -> str:
        return "max_output_tokens"

    @property
    def reasoning_effort(self) -> Any:
        """Return how much the model is to think; None where the request does not say."""
        return (self.reasoning or {}).get("effort")

    @property
    def template_variables(self) -> Mapping[str, object] | None:
        """Return the variables of the chat template that the request sets."""
        return with_effort(self.reasoning_effort, None, self.chat_template_kwargs)

    @property
    def text_format(self) -> Any:
        """Return the form of the reply as the client gave it."""
        return (self.text or {}).get("format") or {"type": "text"}

    def formats(self) -> list[Grammar]:
        return read_format(self.text_format, "text.format")

    def check(self) -> None:
        super().check()
        if (self.text or {}).get("verbosity") not in UNUSED_VERBOSITY:
            raise unsupported("text.verbosity")
        check_effort(self.reasoning_effort, "reasoning.effort")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise wrong("max_output_tokens", "must be 1 or more", self.max_output_tokens)
        metadata = self.metadata or {}
        if len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
            raise RequestError(
                "metadata must be at most 16 pairs, with keys of at most 64 and values of at most 512 characters",
                param="metadata",
            )
        if "message.output_text.logprobs" in (self.include or ()):
            raise RequestError("include: message.output_text.logprobs is not supported", param="include")
        self._tool_use = read_tool_use(self.tools, self.tool_choice, self.parallel_tool_calls, flat=True)
        check_chars(len(self.instructions or ""), "instructions")
        check_messages(self.input, "input")
        self.input = read_input(self.input)
        # The messages are counted once they have joined those of the conversation so far.
        self._size = self._tool_use.size + check_variables(self.chat_template_kwargs)
