"""Which format a model writes its calls in: by its chat template, or as the operator says; and grammars of replies that must be calls: in that
format, with arguments that follow the schema.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from afterglow.errors import ConfigError, ModelError
from afterglow.json_schema import sharpened
from afterglow.text.tool_calls.arguments import arguments_of, closed
from afterglow.text.tool_calls.harmony import HarmonyParser
from afterglow.text.tool_calls.json_calls import HermesParser, LlamaParser
from afterglow.text.tool_calls.mistral import MistralParser
from afterglow.text.tool_calls.parts import ReplyParser, Schemas, nine_characters, openai_id
from afterglow.text.tool_calls.qwen_xml import QwenXmlParser
from afterglow.text.tool_calls.response_template import TemplateParser

Mark = Callable[[str], str]  # writes a mark in a grammar: as a token where it is a special one, and as text otherwise

# As templates write JSON, and as they tell models to.
_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def forced_grammar(
    form: str,
    tools: Schemas,
    mark: Mark,
    *,
    several: bool,
    newer: bool = False,
    answer: Mapping[str, Any] | bool | None = None,
) -> str:
    """Write the Lark grammar of a reply that calls one of `tools`, or several times.

    `form`: of the calls. `newer`: names stand before `[ARGS]`, as Mistral's newer models have it. `answer`: the schema of
    replies that are no call; None if there must be one.
    """
    # Null is as good as nothing, which the compiler does not know.
    said = {name: {key: value for key, value in tool.items() if value is not None} for name, tool in tools.items()}
    start, rules = _calls(form, said, mark, several, newer)
    if answer is None:
        return f"start: {start}\n{rules}"
    asked = {"x-guidance": _FORM, **sharpened(answer)} if isinstance(answer, Mapping) else {"x-guidance": _FORM}
    head = f'{mark("<|channel|>")} "final" {mark("<|message|>")} ' if form == "openai" else ""
    return f"start: calls | answer\ncalls: {start}\nanswer: {head}%json {json.dumps(asked)}\n{rules}"


def _calls(form: str, tools: Schemas, mark: Mark, several: bool, newer: bool) -> tuple[str, str]:
    """Write the rule of all calls, and the rules that it names."""
    if form == "qwen3_coder":
        return 'call ("\\n" call)*' if several else "call", _xml(tools)
    if form == "openai":
        head, between = mark("<|channel|>"), f'{mark("<|constrain|>")} "json" {mark("<|message|>")}'
        calls = [
            f"{head} {_text(f'commentary to=functions.{name} ')} {between} {_json(schema)}"
            for name, schema in tools.items()
        ]
        return "call", f"call: {' | '.join(calls)}\n"
    if form == "mistral" and newer:
        head, between = mark("[TOOL_CALLS]"), mark("[ARGS]")
        calls = [f"{head} {_text(name)} {between} {_json(schema)}" for name, schema in tools.items()]
        return "call+" if several else "call", f"call: {' | '.join(calls)}\n"
    if form == "mistral":
        more = ' (", " call)*' if several else ""
        return f'{mark("[TOOL_CALLS]")} "[" call{more} "]"', _objects(tools, "arguments")
    if form == "llama3_json":
        return "call", _objects(tools, "parameters")
    marked = f'{mark("<tool_call>")} "\\n" call "\\n" {mark("</tool_call>")}'
    return f'{marked} ("\\n" {marked})*' if several else marked, _objects(tools, "arguments")


def _objects(tools: Schemas, field: str) -> str:
    calls = [
        f'{_text(f"""{{"name": {json.dumps(name)}, "{field}": """)} {_json(schema)} "}}"'
        for name, schema in tools.items()
    ]
    return f"call: {' | '.join(calls)}\n"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    """Write JSON as templates do: one space after commas and colons. What the compiler does not know of a schema is not
    enforced. A function has no other arguments than those that are listed, unless the schema says so, or asks for more."""
    said = {"type": "object", **({"additionalProperties": False} if closed(schema) else {}), **sharpened(schema)}
    return "%json " + json.dumps({**said, "x-guidance": {**_FORM, "lenient": True}})


def _xml(tools: Schemas) -> str:
    rules, calls = [], []
    for number, (name, schema) in enumerate(tools.items()):
        head = _text(f"<tool_call>\n<function={name}>\n")
        parts = []
        said = arguments_of(schema)
        for place, (key, value) in enumerate(said.named.items()):
            if value is False and key not in said.required:
                continue
            rule = f"value_{number}_{place}"
            rules.append(_value(rule, value, schema))
            part = f"{_parameter(key)} {rule}"
            parts.append(part if key in said.required else f"({part})?")
        if said.others is not False:
            other = r"/<parameter=[^<>\s]{1,64}>\n/"
            if said.named:
                other += f" & ~({' | '.join(map(_parameter, said.named))})"
            rules += [f"OTHER_{number}: {other}", _value(f"other_{number}", said.others, schema)]
            parts.append(f"(OTHER_{number} other_{number})*")
        calls.append(" ".join([head, *parts, _text("</function>\n</tool_call>")]))
    return "\n".join([f"call: {' | '.join(calls)}", *rules, ""])


def _parameter(name: str) -> str:
    return _text(f"<parameter={name}>\n")


def _value(rule: str, schema: object, root: Mapping[str, Any]) -> str:
    """Write a rule for a parameter's value, up to the end of its tag."""
    end = "\n</parameter>\n"
    said = schema if isinstance(schema, Mapping) else {"allOf": [schema]}  # true and false cannot hold definitions
    if said.get("type") == "string":
        options = said.get("enum")
        if options and isinstance(options, list):
            return f"{rule}: ({' | '.join(_text(str(each)) for each in options)}) {_text(end)}"
        return f"{rule}[suffix={_text(end)}]: /(?s:.*)/"
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    written = json.dumps({**sharpened({**shared, **said}), "x-guidance": {**_FORM, "lenient": True}})
    return f"{rule}: %json {written} {_text(end)}"


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
