"""The fields `tools`, `tool_choice` and `parallel_tool_calls`, as chat completions and responses have them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from afterglow.errors import RequestError
from afterglow.server.bodies.limits import check_chars, wrong
from afterglow.text.chat_template import shown, shown_kind
from afterglow.text.tool_calls.parts import Schemas

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request. `tools`: as templates want them. `name`: the tool that must be called; None for any.
    `parallel`: several calls in one reply are wanted. `path`: of the schema of a tool in the request, for errors."""

    tools: tuple[dict[str, Any], ...] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    parallel: bool = True
    path: str = "tools[{}].function.parameters"

    @cached_property
    def schemas(self) -> Schemas:
        """The schema of each tool's arguments, by name."""
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}

    @cached_property
    def size(self) -> int:
        """The characters of the tools, written as JSON."""
        return len(json.dumps(self.tools))

    @property
    def parsed(self) -> bool:
        """Check whether calls are looked for in the reply."""
        return bool(self.tools) and self.choice != "none"

    @property
    def forced(self) -> bool:
        """Check whether the reply must be a call."""
        return self.choice == "required" or self.name is not None


def read_tool_use(tools: object, choice: object, parallel: bool | None, *, flat: bool = False) -> ToolUse:
    """Read the three fields. `flat`: a tool's name stands beside its type, as in responses. Raises: RequestError, with the
    path of the mistake."""

    def read(tool: Mapping[str, Any], place: str) -> tuple[dict[str, Any], str]:
        if tool.get("type") != "function":
            raise RequestError(f"{place} is {shown_kind(tool)}; only functions are supported", param=f"{place}.type")
        said, where = (tool, place) if flat else (tool.get("function"), f"{place}.function")
        if not isinstance(said, Mapping):
            raise wrong(where, "must be an object with a name", said)
        return read_function(said, where), where

    found = read_tools(tools, read)
    names = [tool["function"]["name"] for tool in found]
    path = "tools[{}].parameters" if flat else ToolUse.path
    if choice is None:
        return ToolUse(found, "auto", None, parallel is not False, path)
    if choice in ("none", "auto", "required"):
        if choice == "required" and not found:
            raise RequestError("tool_choice: 'required' needs tools", param="tool_choice")
        return ToolUse(found, choice, None, parallel is not False, path)
    wanted = "must be 'none', 'auto', 'required' or an object with the name of a function"
    if not isinstance(choice, Mapping):
        raise wrong("tool_choice", wanted, choice)
    if choice.get("type") != "function":
        raise RequestError(f"tool_choice is {shown_kind(choice)}; it {wanted}", param="tool_choice.type")
    said, where = (choice, "tool_choice") if flat else (choice.get("function"), "tool_choice.function")
    name = said.get("name") if isinstance(said, Mapping) else None
    if name not in names:
        raise RequestError(f"{where}.name: there is no tool {shown(name)} in tools", param=f"{where}.name")
    return ToolUse(found, "required", name, parallel is not False, path)


def read_tools(
    tools: object, read: Callable[[Mapping[str, Any], str], tuple[dict[str, Any], str]]
) -> tuple[dict[str, Any], ...]:
    """Read a list of tools. `read` reads the one at a path, and returns it with the path of its name. Raises: RequestError, with the
    path of the mistake."""
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise wrong("tools", "must be a list", tools)
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools: at most {MAX_TOOLS} are accepted, got {len(tools)}", param="tools")
    found, names = [], set()
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        if not isinstance(tool, Mapping):
            raise wrong(place, "must be an object", tool)
        function, where = read(tool, place)
        name = function["function"]["name"]
        if name in names:
            raise RequestError(f"{where}.name: there are two tools {name!r}", param=f"{where}.name")
        names.add(name)
        found.append(function)
    check_chars(len(json.dumps(found)), "tools")
    return tuple(found)


def read_function(said: Mapping[str, Any], where: str, schema: str = "parameters") -> dict[str, Any]:
    """Read a tool. `schema`: the field of its arguments' JSON schema. Raises: RequestError."""
    name, description, parameters = said.get("name"), said.get("description"), said.get(schema)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(f"{where}.name", "must be 1 to 128 letters, digits and _ - . : /", name)
    if description is not None and not isinstance(description, str):
        raise wrong(f"{where}.description", "must be a string", description)
    if not isinstance(said.get("strict"), bool | None):
        raise wrong(f"{where}.strict", "must be true or false", said["strict"])
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise wrong(f"{where}.{schema}", "must be a JSON schema, which is an object", parameters)
    check_schema(parameters, f"{where}.{schema}")
    if parameters.get("type", "object") != "object":
        raise wrong(f"{where}.{schema}.type", "must be 'object'", parameters["type"])
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": parameters}}


def check_schema(schema: object, where: str) -> None:
    """Check the shape of a JSON schema. Raises: RequestError, with the path of the mistake."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise wrong(where, "must be a JSON schema", schema)
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None and not all(isinstance(each, str) and each in _TYPES for each in kinds):
        raise wrong(f"{where}.type", f"must be one of {', '.join(_TYPES)}, or a list of them", kind)
    for key in _SCHEMA_MAPS:
        if (held := schema.get(key)) is not None:
            if not isinstance(held, Mapping):
                raise wrong(f"{where}.{key}", "must be an object of schemas", held)
            for name, each in held.items():
                check_schema(each, f"{where}.{key}.{name}")
    for key in _SCHEMA_LISTS:
        if (held := schema.get(key)) is not None:
            if not isinstance(held, list) or not held:
                raise wrong(f"{where}.{key}", "must be a list of at least one schema", held)
            for number, each in enumerate(held):
                check_schema(each, f"{where}.{key}[{number}]")
    for key in _SCHEMAS:
        if (held := schema.get(key)) is not None and not (key == "items" and isinstance(held, list)):
            check_schema(held, f"{where}.{key}")
    required, options = schema.get("required"), schema.get("enum")
    if required is not None and not (isinstance(required, list) and all(isinstance(each, str) for each in required)):
        raise wrong(f"{where}.required", "must be a list of names", required)
    if options is not None and not isinstance(options, list):
        raise wrong(f"{where}.enum", "must be a list", options)
