"""Which format a model writes its calls in: by its chat template, or as the operator says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from afterglow.errors import ConfigError, ModelError
from afterglow.text.tool_calls.harmony import HarmonyParser
from afterglow.text.tool_calls.json_calls import HermesParser, LlamaParser
from afterglow.text.tool_calls.mistral import MistralParser
from afterglow.text.tool_calls.parts import ReplyParser, Schemas, nine_characters, openai_id
from afterglow.text.tool_calls.qwen_xml import QwenXmlParser
from afterglow.text.tool_calls.response_template import TemplateParser

log = logging.getLogger("afterglow.text")

FormatName = Literal["hermes", "llama3_json", "mistral", "qwen3_coder", "openai", "response_template"]

_PARSERS: Mapping[str, type[ReplyParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaParser,
    "mistral": MistralParser,
    "qwen3_coder": QwenXmlParser,
    "openai": HarmonyParser,
}
# Whose marks are special tokens, which a decoder hides unless it is told otherwise.
_SPECIAL = ("llama3_json", "mistral", "openai", "response_template")
_MARKS: tuple[tuple[str, FormatName], ...] = (  # in a chat template, the most telling first
    ("<|channel|>", "openai"),
    ("[TOOL_CALLS]", "mistral"),
    ("<parameter=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("<|start_header_id|>", "llama3_json"),
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format in which a model writes calls. `special`: its marks are special tokens, which must be decoded too.
    `written`: the format of calls that are forced, where `name` only says how they are read; `newer` is Mistral's."""

    name: FormatName
    written: FormatName
    special: bool
    call_id: Callable[[], str]
    response_template: Mapping[str, Any] | None = None
    newer: bool = False

    def parser(self, tools: Schemas, prompt: str = "", *, one_call: bool = False) -> ReplyParser:
        """Make a parser for one reply to `prompt`. Raises: ModelError."""
        if self.name == "response_template":
            make: Callable[..., ReplyParser] = partial(
                TemplateParser, template=self.response_template or {}, prompt=prompt
            )
        else:
            make = _PARSERS[self.name]
        return make(tools, one_call=one_call, call_id=self.call_id)


def choose_format(
    wanted: str, template: str, response_template: Mapping[str, Any] | None = None, *, own: bool = True
) -> ToolFormat:
    """Choose the format of a model. `template`: its chat template's source. `own`: the template writes tools; otherwise
    the model is told of them, and of the Hermes format, in the system prompt.

    Raises: ConfigError, for a format that cannot be.
    """
    name: FormatName
    marked: FormatName = next((name for mark, name in _MARKS if mark in template), "hermes") if own else "hermes"
    if wanted == "auto":
        name = marked
        if response_template is not None:
            try:
                TemplateParser({}, template=response_template)
                name = "response_template"
            except ModelError as error:
                log.warning("%s; calls are read as %s", error, name)
    elif wanted in get_args(FormatName):
        name = wanted  # type: ignore[assignment]
    else:
        raise ConfigError(
            f"--tool-call-parser must be auto or one of {', '.join(get_args(FormatName))}, got {wanted!r}"
        )
    if name == "response_template" and response_template is None:
        raise ConfigError(
            "--tool-call-parser response_template: the model's tokenizer_config.json has no response_template"
        )
    if name == "response_template":
        TemplateParser({}, template=response_template or {})  # complains now, not with the first request
    nine = name == "mistral" or "length != 9" in template
    written = marked if name == "response_template" else name
    call_id = nine_characters if nine else openai_id
    return ToolFormat(name, written, name in _SPECIAL, call_id, response_template, "[ARGS]" in template)
