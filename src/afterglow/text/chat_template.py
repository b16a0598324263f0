"""Messages to text, by the model's own chat template (Jinja, in a sandbox: templates come from strangers).

Where a template knows no tools, they are in the system prompt, in the form of the Hermes models, on which many others were trained.
Calls and results become plain messages.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from afterglow.errors import ModelError, RequestError

Message = Mapping[str, Any]
CHANNEL = "<|channel|>"  # in templates of models that write each part of a reply to a channel (gpt-oss)

HEAD = (
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


def without_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], system: bool) -> list[Message]:
    """Write tools, calls and results into plain messages. `system`: the template knows system messages; otherwise the
    tools go before the first user's message."""
    plain: list[Message] = []
    answered = False  # the last message holds results, and further ones join it
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if answered:
                text = f"{plain.pop()['content']}\n{text}"
            plain.append({"role": "user", "content": text})
            answered = True
            continue
        answered = False
        if calls := message.get("tool_calls"):
            texts = [message["content"]] if message["content"] else []
            texts += [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in calls]
            message = {"role": message["role"], "content": "\n".join(texts)}
        plain.append(message)
    if not tools:
        return plain
    told = HEAD + "\n".join(map(_json, tools)) + TAIL
    first = next((n for n, message in enumerate(plain) if message["role"] in ("system", "developer")), None)
    if first is None and system:
        return [{"role": "system", "content": told}, *plain]
    if first is None:
        first = next((n for n, message in enumerate(plain) if message["role"] == "user"), None)
        if first is None:
            return [{"role": "user", "content": told}, *plain]
        told = f"{told}\n\n{plain[first]['content']}"
    else:
        told = f"{plain[first]['content']}\n\n{told}"
    plain[first] = {**plain[first], "content": told}
    return plain


def _json(value: Mapping[str, Any]) -> str:
    named = {key: value[key] for key in ("name", "arguments") if key in value} or dict(value)
    return json.dumps(named, ensure_ascii=False)


def shown(value: object) -> str:
    """Write a value of a request for a message about it, in the terms of JSON. The result is short, also for a long
    value."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 80 else f"{value[:80]!r}…"
    if value is None or isinstance(value, bool | int | float):
        written = json.dumps(value)
        return written if len(written) <= 80 else f"{written[:80]}…"
    return "an array" if isinstance(value, list | tuple) else "an object"


def shown_kind(part: object) -> str:
    """Describe a part of a request that is not supported: by its type, if it has one."""
    return f"of type {shown(part['type'])}" if isinstance(part, Mapping) and "type" in part else shown(part)


class ChatTemplate:
    """A compiled chat template. `variables` are the special tokens that templates name (`bos_token`, ...).

    `tool_source`: the template for requests with tools, where the model has one of its own for them. A template that
    writes no tools gets them in the system prompt.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None, tool_source: str | None = None) -> None:
        self.source = source if tool_source is None else tool_source  # that writes tools
        self._variables = dict(variables or {})
        self._plain = _OneTemplate(source)
        self._tools = self._plain if tool_source is None else _OneTemplate(tool_source)
        self.writes_tools = self._knows(_PROBE["function"]["name"], {"tools": [_PROBE]})
        self._knows_system = self.writes_tools or self._knows("probe", {}, system=True)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Write a conversation. `variables` are further variables that the template may know (`enable_thinking`, ...).
        `continue_final_message`: end with the content of the last message, and without a generation prompt.

        Raises: RequestError, for messages that the template refuses.
        """
        if continue_final_message:
            return self._render_open(messages, tools, variables)
        if not self.writes_tools:
            messages, tools = without_tools(messages, tools, self._knows_system), ()
        names: dict[str, object] = {"tools": list(tools) or None, "documents": None, **self._variables}
        names |= {**(variables or {}), "messages": messages, "add_generation_prompt": add_generation_prompt}
        used = bool(tools) or any("tool_calls" in message for message in messages)
        return (self._tools if used else self._plain).render(messages, names)

    def _render_open(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, object] | None
    ) -> str:
        """Write a conversation up to the end of its last content. A mark shows where that is, and keeps white space before it,
        which templates drop. Raises: RequestError."""
        if CHANNEL in self.source:
            raise RequestError("this model writes replies in channels, and cannot continue one", param="messages")
        mark = f"\ue000{secrets.token_hex(8)}\ue001"
        *before, last = messages
        marked = [*before, {**last, "content": last["content"] + mark}]
        written = self.render(marked, tools=tools, add_generation_prompt=False, variables=variables)
        text, found, _ = written.rpartition(mark)
        if not found or not text.rstrip().endswith(last["content"].strip()):
            raise RequestError(
                "this model's chat template leaves out a part of the message to continue (thoughts, say)",
                param="messages",
            )
        return text

    def knows_role(self, role: str) -> bool:
        """Check whether messages of a role show in what the template writes, or may: others would be lost without a word."""
        return self._any_role or any(f"{quote}{role}{quote}" in self.source for quote in "'\"")

    @cached_property
    def _any_role(self) -> bool:
        said = [{"role": "user", "content": "a"}, {"role": "probe_role", "content": "probe_text"}]
        names = {"tools": None, "documents": None, **self._variables, "add_generation_prompt": True}
        try:
            return "probe_text" in self._plain.render(said, names)
        except RequestError:
            return True  # such a template refuses what it does not know

    def _knows(self, wanted: str, more: Mapping[str, object], system: bool = False) -> bool:
        """Check whether a tool, or a system message, shows in what the template writes."""
        messages = [{"role": "system", "content": "probe"}] if system else []
        messages.append({"role": "user", "content": "a"})
        names = {"tools": None, "documents": None, **self._variables, **more, "add_generation_prompt": True}
        try:
            return wanted in self._tools.render(messages, {**names, "messages": messages})
        except RequestError:
            return False


_PROBE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_of_tools",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A."}}, "required": []},
    },
}


class _OneTemplate:
    """One compiled Jinja template."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is not valid Jinja: {error}") from error
        self._knows_developer = "developer" in source
        self._reasoning = [name for name in ("reasoning", "thinking") if re.search(rf"\b{name}\b", source)]

    def render(self, messages: Sequence[Message], names: Mapping[str, object]) -> str:
        """Write a conversation; `names` are the template's variables. Raises: RequestError."""
        if not self._knows_developer:
            # Newer clients call the system role so; templates that do not know it would drop the message.
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        if self._reasoning:
            messages = [self._renamed(m) if m.get("reasoning_content") else m for m in messages]
        try:
            return self._template.render({**names, "messages": messages})
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            # A model may have written arguments that are no object, and the template goes through their names.
            mended = [_with_objects(message) for message in messages]
            if mended != list(messages):
                return self.render(mended, names)
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def _renamed(self, message: Message) -> Message:
        """Give a message its reasoning under the names that this template knows too. gpt-oss wants it beside calls, unless
        there is content."""
        names = [
            name
            for name in self._reasoning
            if name != "thinking" or not (message["content"] and "tool_calls" in message)
        ]
        return {**dict.fromkeys(names, message["reasoning_content"]), **message}


def _with_objects(message: Message) -> Message:
    """Give calls whose arguments are no JSON object an object that holds them as text, under the name that Anthropic recommends."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        said = call["function"]["arguments"]
        if not isinstance(said, Mapping):
            said = {} if str(said).strip() in ("", "null") else {"INVALID_JSON": said}
        calls.append({**call, "function": {**call["function"], "arguments": said}})
    return {**message, "tool_calls": calls}


def find_chat_template(model_dir: Path, tokenizer_config: Mapping[str, Any], wanted: str = "default") -> str | None:
    """Read a template's source: a file of its own goes before the tokenizer's configuration. `wanted`: its name, where a
    model has several. Raises: ModelError."""
    if wanted != "default":
        path = model_dir / "additional_chat_templates" / f"{wanted}.jinja"
        return path.read_text("utf-8") if path.is_file() else _pick(tokenizer_config.get("chat_template"), wanted)
    for name in ("chat_template.jinja", "chat_template.json"):
        path = model_dir / name
        if path.is_file():
            text = path.read_text("utf-8")
            if name.endswith(".jinja"):
                return text
            try:
                return _pick(json.loads(text)["chat_template"])
            except (ValueError, KeyError, TypeError) as error:
                raise ModelError(f"{path} is not a chat template file: {error}") from error
    return _pick(tokenizer_config.get("chat_template"))


def _pick(template: object, wanted: str = "default") -> str | None:
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get(wanted)
    elif wanted != "default":
        return None
    return template if isinstance(template, str) else None


class _GenerationBlocks(jinja2.ext.Extension):
    """Support `{% generation %}`, which marks replies for training, by showing the block's content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Parse one block; Jinja calls this method."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
