"""Request bodies: what is accepted, what is refused by name, and how it becomes sampling parameters.

Fields that change what a reply means are honoured or refused; all other unknown fields are ignored, since
clients send plenty of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from afterglow.errors import ModelError, RequestError
from afterglow.request import SamplingParams

MAX_CHOICES = 128
MAX_STOPS = 64

# name -> values that mean "not used"
_NOT_SUPPORTED: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
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
    """What `/v1/completions` and `/v1/chat/completions` share."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    cache_salt: str | None = None
    session_id: str | None = None
    priority: int | None = 0
    response_format: dict[str, Any] | None = None
    user: str | None = None

    def check(self) -> None:
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            raise RequestError(f"n must be between 1 and {MAX_CHOICES}, got {self.n}", param="n")
        if self.cache_salt == "":
            raise RequestError("cache_salt must be a non-empty string; leave it out for none", param="cache_salt")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for stream: true", param="stream_options")
        if len(self.stops) > MAX_STOPS or not all(self.stops):
            raise RequestError(f"stop must be at most {MAX_STOPS} non-empty strings", param="stop")
        kind = (self.response_format or {"type": "text"}).get("type")
        if kind != "text":
            raise RequestError(
                f"response_format of type {kind!r} is not supported, only 'text'", param="response_format"
            )

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self, defaults: Defaults, max_tokens: int, logprobs: int | None) -> SamplingParams:
        def pick(name: str) -> Any:
            value = getattr(self, name)
            return getattr(defaults, name) if value is None else value

        return SamplingParams(
            max_tokens=max_tokens,
            temperature=pick("temperature"),
            top_p=pick("top_p"),
            top_k=pick("top_k"),
            min_p=pick("min_p"),
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
        )


class CompletionBody(Body):
    prompt: Any = None
    best_of: int | None = None
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(f"best_of must equal n ({self.n or 1}), got {self.best_of}", param="best_of")


class ChatBody(Body):
    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        taken = {"messages", "add_generation_prompt"} & set(self.chat_template_kwargs or ())
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


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    tokens: list[int]


B = TypeVar("B", bound=BaseModel)


async def read_body(request: Request, kind: type[B]) -> B:
    """The request's JSON as a `kind`, whatever its content type says (curl -d sends another). Errors:
    RequestError."""
    data = await request.body()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = f"{error}" if isinstance(error, json.JSONDecodeError) else "not UTF-8, or nested too deeply"
        raise RequestError(f"the request body is not valid JSON: {reason}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, got {type(value).__name__}")
    for name, unused in _NOT_SUPPORTED.items():
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


def _as_request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    # In a union the location goes on with the names of the alternatives: only the field is of use.
    param = str(first["loc"][0]) if first["loc"] else None
    got = repr(first.get("input"))
    if first["type"] == "missing":
        return RequestError(f"{param} is required", param=param)
    message = first["msg"][:1].lower() + first["msg"][1:]
    return RequestError(f"{param}: {message}, got {got if len(got) < 80 else got[:80] + '…'}", param=param)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sampling where the request says nothing: `generation_config.json` of the model, else OpenAI's
    defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int | None = None
    ignored: tuple[str, ...] = ()  # settings of the model's author that are not honoured

    @classmethod
    def read(cls, model_dir: Path) -> Defaults:
        path = model_dir / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            config = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(config, Mapping):
            raise ModelError(f"{path} is not a JSON object")
        names = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
        found = {name: config[name] for name in names if config.get(name) is not None}
        ignored = tuple(
            f"{name}={config[name]}"
            for name in ("repetition_penalty", "length_penalty", "min_new_tokens")
            if config.get(name) is not None and config[name] not in _NOT_SUPPORTED.get(name, (0,))
        )
        try:
            SamplingParams(**{k: v for k, v in found.items() if k != "max_new_tokens"})
        except (RequestError, TypeError) as error:
            raise ModelError(f"{path}: {error}") from None
        return cls(**found, ignored=ignored)
