"""Request bodies: what is accepted, what is refused by name, and how it becomes sampling parameters.

Fields that change what a reply means are honoured or refused; all other unknown fields are ignored, since
clients send plenty of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from afterglow.errors import RequestError
from afterglow.request import MAX_LOGPROBS, SamplingParams
from afterglow.server.defaults import Defaults
from afterglow.server.stream import ClientGone
from afterglow.text.chat import shown

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_SESSION_NAME = 256
LONGEST_TTL_S = 10 * 365 * 24 * 3600.0
RETENTIONS = {"in_memory": 3600.0, "24h": 24 * 3600.0}  # OpenAI keeps what is in memory for an hour at most

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what JSON calls a number may have thousands of digits
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


class Body(BaseModel):
    """What all requests for replies share."""

    model_config = ConfigDict(extra="ignore", strict=True)
    unsupported: ClassVar[Unused] = {}

    model: str | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: Int | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    cache_salt: str | None = None
    session_id: str | None = None
    priority: Int | None = 0
    kv_retention: float | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    user: str | None = None

    def check(self) -> None:
        for name in ("cache_salt", "prompt_cache_key"):
            if getattr(self, name) == "":
                raise RequestError(f"{name} must be a non-empty string; leave it out for none", param=name)
        check_session(self.session_id)
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

    prompt: Any = None
    best_of: Int | None = None
    echo: bool | None = False
    logprobs: Int | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(f"best_of must equal n ({self.n or 1}), got {self.best_of}", param="best_of")


class ChatBody(ChoicesBody):
    messages: Any = None
    truncation: Literal["auto", "disabled"] | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = False
    top_logprobs: Int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
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

    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: Int | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
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


class TokenizeBody(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class PromptBody(BaseModel):
    """`PUT /v1/cache/prompts/NAME`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    text: str


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    tokens: list[Int]


B = TypeVar("B", bound=BaseModel)


async def read_body(request: Request, kind: type[B]) -> B:
    """The request's JSON as a `kind`, whatever its content type says (curl -d sends another). Errors:
    RequestError."""
    try:
        data = await request.body()
    except ClientDisconnect:
        raise ClientGone from None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "not UTF-8, nested too deeply, or with a number of thousands of digits"
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error}"
        raise RequestError(f"the request body is not valid JSON: {reason}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, got {shown(value)}")
    unsupported = {**_NOT_SUPPORTED, **(kind.unsupported if issubclass(kind, Body) else {})}
    for name, unused in unsupported.items():
        wanted = value.get(name)
        if wanted is not None and wanted not in unused:
            raise RequestError(f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise _as_request_error(error) from None
    if isinstance(body, Body):
        body.check()
    return body


_MESSAGES = {  # where pydantic's own speak of Python
    "list_type": "input should be a valid array",
    "dict_type": "input should be a valid object",
    "model_type": "input should be a valid object",
    "greater_than_equal": "input should be a 64-bit integer",
    "less_than": "input should be a 64-bit integer",
}


def _as_request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    # In a union the location goes on with the names of the alternatives: only the field is of use.
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "missing":
        return RequestError(f"{param} is required", param=param)
    message = _MESSAGES.get(first["type"]) or first["msg"][:1].lower() + first["msg"][1:]
    return RequestError(f"{param}: {message}, got {shown(first.get('input'))}", param=param)
