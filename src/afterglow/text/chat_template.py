"""Messages to text, by the model's own chat template (Jinja, in a sandbox: templates come from strangers)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from afterglow.errors import ModelError, RequestError

Message = Mapping[str, Any]


def texts_in(messages: object) -> Iterator[str]:
    """Yield all text of messages as a client sent them, before they are checked."""
    for message in messages if isinstance(messages, list) else ():
        for value in message.values() if isinstance(message, dict) else ():
            for part in value if isinstance(value, list) else [value]:
                text = part.get("text") if isinstance(part, dict) else part
                if isinstance(text, str):
                    yield text


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


def flatten_messages(messages: object, name: str = "messages") -> list[dict[str, Any]]:
    """Check chat messages and copy them with contents that are strings. `name` is the request's field.

    Raises: RequestError, which names the place of a content that is not text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"{name} must be a list with at least one message", param=name)
    flat = []
    for number, message in enumerate(messages):
        where = f"{name}[{number}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be an object with role and content", param=where)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RequestError(f"{where}.role must be a non-empty string, got {shown(role)}", param=f"{where}.role")
        for field in ("tool_calls", "function_call", "audio"):
            if message.get(field):
                raise RequestError(f"{where}.{field} is not supported", param=f"{where}.{field}")
        content = _flatten_content(message.get("content"), f"{where}.content", role)
        flat.append({**message, "role": role, "content": content})
    return flat


def _flatten_content(content: object, where: str, role: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} must be a string or a list of text parts, got {shown(content)}", param=where)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise RequestError(
                f"{where}[{number}] is {shown_kind(part)}; only parts of type 'text' are supported",
                param=f"{where}[{number}]",
            )
        texts.append(text)
    return "\n".join(texts)


class ChatTemplate:
    """A compiled chat template. `variables` are the special tokens that templates name (`bos_token`, ...)."""

    def __init__(self, source: str, variables: Mapping[str, str] | None = None) -> None:
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
        self._variables = dict(variables or {})
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Write a conversation. `variables` are further variables that the template may know (`enable_thinking`, ...).

        Raises: RequestError, for messages that the template refuses.
        """
        if not self._knows_developer:
            # Newer clients call the system role so; templates that do not know it would drop the message.
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        names: dict[str, object] = {"tools": None, "documents": None, **self._variables, **(variables or {})}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(names)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def find_chat_template(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Read the template's source: a file of its own goes before the tokenizer's configuration. Raises: ModelError."""
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


def _pick(template: object) -> str | None:
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
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
