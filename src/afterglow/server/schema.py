"""Request bodies: what is accepted, what is refused by name, and how it becomes sampling parameters.

Fields that change what a reply means are honoured or refused; all other unknown fields are ignored, since
clients send plenty of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, PrivateAttr
from pydantic_core import PydanticCustomError

from afterglow.errors import RequestError
from afterglow.request import MAX_LOGPROBS, SamplingParams
from afterglow.server.defaults import Defaults
from afterglow.server.items import read_input
from afterglow.server.limits import (
    MAX_CHAT_VALUES,
    MAX_NAME,
    MAX_VALUES,
    check_chars,
    check_ids,
    check_messages,
    read_documents,
    read_inputs,
    read_prompts,
)
from afterglow.text.chat import shown

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_SESSION_NAME = 256
PRIORITIES = 100  # above and below 0
LONGEST_TTL_S = 10 * 365 * 24 * 3600.0
RETENTIONS = {"in_memory": 3600.0, "24h": 24 * 3600.0}  # OpenAI keeps what is in memory for an hour at most

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what JSON calls a number may have thousands of digits


def most(count: int) -> BeforeValidator:
    """So many characters, elements or members: checked before anything else is, and in place of a message for each."""

    def check(value: object) -> object:
        if isinstance(value, str | list | dict) and len(value) > count:
            what = "characters" if isinstance(value, str) else "entries"
            raise PydanticCustomError("too_large", f"at most {count} {what} are accepted, got {len(value)}")
        return value

    return BeforeValidator(check)


Name = Annotated[str, most(MAX_NAME)]
Unused = Mapping[str, tuple[object, ...]]  # fields that are not supported, with the values that mean "not used"

_NOT_SUPPORTED: Unused = {
    "length_penalty": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "continue_final_message": (False,),
}


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonBody(BaseModel):
    """What all requests share. Only what is small, or has been counted, may be in one: it goes from process to process."""

    model_config = ConfigDict(extra="ignore", strict=True)
    most_values: ClassVar[int] = MAX_CHAT_VALUES

    @classmethod
    def refused(cls) -> Unused:
        """Fields that are refused by name, unless they have a value that means "not used"."""
        return _NOT_SUPPORTED

    def check(self) -> None:
        """What types do not say. May put inputs of several forms into one. Errors: RequestError."""


class Body(JsonBody):
    """What all requests for replies share."""

    unsupported: ClassVar[Unused] = {}

    model: Name | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, most(MAX_NAME)] = None
    min_tokens: Int | None = None
    seed: Int | None = None
    stop: Annotated[Name | list[Name] | None, most(MAX_NAME)] = None
    stop_token_ids: Annotated[list[Int] | None, most(MAX_NAME)] = None
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
        return {**_NOT_SUPPORTED, **cls.unsupported}

    def check(self) -> None:
        for name in ("cache_salt", "prompt_cache_key"):
            if getattr(self, name) == "":
                raise RequestError(f"{name} must be a non-empty string; leave it out for none", param=name)
        check_session(self.session_id)
        if not -PRIORITIES <= (self.priority or 0) <= PRIORITIES:
            raise RequestError(
                f"priority must lie between {-PRIORITIES} and {PRIORITIES} (lower is served first), got {self.priority}",
                param="priority",
            )
        if len(self.stops) > MAX_STOPS or not all(self.stops):
            raise RequestError(f"stop must be at most {MAX_STOPS} non-empty strings", param="stop")
        _ = self.ttl_s

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` by token id: JSON's keys are strings. Errors: RequestError."""
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
        """Seconds from `prompt_cache_retention`. Errors: RequestError."""
        value = self.prompt_cache_retention
        if value is None:
            return None
        if isinstance(value, str) and value in RETENTIONS:
            return RETENTIONS[value]
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_TTL_S:
            return float(value)
        raise RequestError(
            f"prompt_cache_retention must be 'in_memory', '24h', or a number of seconds (up to {LONGEST_TTL_S:.0f}), "
            f"got {shown(value)}",
            param="prompt_cache_retention",
        )

    @property
    def volatile(self) -> bool:
        """Is nothing of it to be written to disk? OpenAI holds what is "in_memory" in volatile memory only."""
        return bool(self.prompt_cache_retention == "in_memory")

    def sampling(self, defaults: Defaults, max_tokens: int, logprobs: Int | None) -> SamplingParams:
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
        )


class ChoicesBody(Body):
    """What `/v1/completions` and `/v1/chat/completions` share."""

    stream_options: StreamOptions | None = None
    n: Int | None = 1
    max_tokens: Int | None = None
    response_format: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            raise RequestError(f"n must be between 1 and {MAX_CHOICES}, got {self.n}", param="n")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for stream: true", param="stream_options")
        kind = (self.response_format or {"type": "text"}).get("type")
        if kind != "text":
            raise RequestError(
                f"response_format of type {shown(kind)} is not supported, only 'text'", param="response_format"
            )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionBody(ChoicesBody):
    unsupported = {"truncation": ("disabled",)}  # there are no turns in it
    most_values = MAX_VALUES

    prompt: Any = None  # once it is checked, a list of texts or of lists of token ids
    best_of: Int | None = None
    echo: bool | None = False
    logprobs: Int | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(f"best_of must equal n ({self.n or 1}), got {self.best_of}", param="best_of")
        self.prompt = read_prompts(self.prompt)


class ChatBody(ChoicesBody):
    messages: Any = None
    truncation: Literal["auto", "disabled"] | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = False
    top_logprobs: Int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    _size: int = PrivateAttr(0)

    @property
    def size(self) -> int:
        """How much work the messages are, in characters."""
        return self._size

    def check(self) -> None:
        super().check()
        self._size = check_messages(self.messages)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {self.top_logprobs}", param="top_logprobs"
            )
        check_variables(self.chat_template_kwargs)


class ResponseBody(Body):
    """`/v1/responses`."""

    unsupported = {
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "context_management": ([],),
        "max_tool_calls": (),
        "top_logprobs": (0,),
    }

    input: Any = None  # once it is checked, a list of items
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: bool | None = True
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: Int | None = None
    metadata: Annotated[dict[str, str] | None, most(16)] = None
    include: Annotated[list[Name] | None, most(64)] = None
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        check_variables(self.chat_template_kwargs)
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise RequestError(
                f"max_output_tokens must be 1 or more, got {self.max_output_tokens}", param="max_output_tokens"
            )
        metadata = self.metadata or {}
        if len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
            raise RequestError(
                "metadata must be at most 16 pairs, with keys of at most 64 and values of at most 512 characters",
                param="metadata",
            )
        if "message.output_text.logprobs" in (self.include or ()):
            raise RequestError("include: message.output_text.logprobs is not supported", param="include")
        form = (self.text or {}).get("format") or {"type": "text"}
        kind = form.get("type") if isinstance(form, dict) else form
        if kind != "text":
            raise RequestError(f"text.format of type {shown(kind)} is not supported, only 'text'", param="text.format")
        check_chars(len(self.instructions or ""), "instructions")
        check_messages(self.input, "input")
        self.input = read_input(self.input)


def check_session(name: str | None) -> None:
    """Errors: RequestError."""
    if name is not None and not (0 < len(name) <= MAX_SESSION_NAME and name.isprintable()):
        raise RequestError(
            f"session_id must be 1 to {MAX_SESSION_NAME} printable characters, got {name[:80]!r}", param="session_id"
        )


def check_variables(variables: Mapping[str, object] | None) -> None:
    """Errors: RequestError."""
    taken = {"messages", "add_generation_prompt"} & set(variables or ())
    if taken:
        raise RequestError(f"chat_template_kwargs cannot set {sorted(taken)[0]}", param="chat_template_kwargs")


class TokenizeBody(JsonBody):
    """`/tokenize`."""

    model: Name | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    _size: int = PrivateAttr(0)

    @property
    def size(self) -> int:
        return self._size

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        check_chars(len(self.prompt or ""), "prompt")
        check_variables(self.chat_template_kwargs)
        self._size = len(self.prompt) if self.prompt is not None else check_messages(self.messages)


class PromptBody(JsonBody):
    """`PUT /v1/cache/prompts/NAME`."""

    text: str

    def check(self) -> None:
        check_chars(len(self.text), "text")


class DetokenizeBody(JsonBody):
    """`/detokenize`."""

    most_values = MAX_VALUES

    model: Name | None = None
    tokens: Annotated[list[Int], FailFast()]

    def check(self) -> None:
        check_ids(len(self.tokens), "tokens")


class EmbeddingBody(JsonBody):
    """`/v1/embeddings`. `user` is ignored, as is whatever else clients send."""

    most_values = MAX_VALUES

    input: Any = None  # once it is checked, a list of texts or of lists of token ids
    model: Name | None = None
    encoding_format: Any = None
    dimensions: Int | None = None
    truncate_prompt_tokens: Int | None = None

    def check(self) -> None:
        self.input = read_inputs(self.input)


class RerankBody(JsonBody):
    """`/v1/rerank`."""

    model: Name | None = None
    query: Any = None
    documents: Any = None  # once it is checked, a list of texts
    top_n: Int | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: Int | None = None

    def check(self) -> None:
        if not isinstance(self.query, str) or not self.query:
            raise RequestError(f"query must be a non-empty string, got {shown(self.query)}", param="query")
        check_chars(len(self.query), "query")
        self.documents = read_documents(self.documents)
        if self.top_n is not None and self.top_n < 1:
            raise RequestError(f"top_n must be 1 or more, got {self.top_n}", param="top_n")
