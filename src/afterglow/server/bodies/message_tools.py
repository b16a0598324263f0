"""The fields `tools` and `tool_choice` in Anthropic's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from afterglow.errors import RequestError
from afterglow.server.bodies.cache_marks import CacheMarks
from afterglow.server.bodies.limits import check_chars
from afterglow.server.bodies.tool_fields import MAX_TOOLS, ToolUse, read_function
from afterglow.text.block_marks import BlockMark
from afterglow.text.chat_template import shown, shown_kind

_CHOICES: Mapping[str, Literal["none", "auto", "required"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}
_PATH = "tools[{}].input_schema"


def read_message_tools(tools: object, choice: object, marks: CacheMarks) -> ToolUse:
    """Read both fields; adds the marks of tools. Raises: RequestError, with the path of the mistake."""
    found = _read_tools(tools, marks)
    if choice is None:
        return ToolUse(found, path=_PATH)
    if not isinstance(choice, Mapping):
        raise RequestError(f"tool_choice must be an object with a type, got {shown(choice)}", param="tool_choice")
    kind, single = choice.get("type"), choice.get("disable_parallel_tool_use")
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestError(
            f"tool_choice.type must be 'auto', 'any', 'tool' or 'none', got {shown(kind)}", param="tool_choice.type"
        )
    if not isinstance(single, bool | None):
        where = "tool_choice.disable_parallel_tool_use"
        raise RequestError(f"{where} must be true or false, got {shown(single)}", param=where)
    if kind == "any" and not found:
        raise RequestError("tool_choice.type: 'any' needs tools", param="tool_choice.type")
    name = choice.get("name") if kind == "tool" else None
    if kind == "tool" and name not in [tool["function"]["name"] for tool in found]:
        raise RequestError(f"tool_choice.name: there is no tool {shown(name)} in tools", param="tool_choice.name")
    return ToolUse(found, _CHOICES[kind], name, not single, _PATH)


def _read_tools(tools: object, marks: CacheMarks) -> tuple[dict[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise RequestError(f"tools must be a list, got {shown(tools)}", param="tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools: at most {MAX_TOOLS} are accepted, got {len(tools)}", param="tools")
    found, names = [], set()
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if not isinstance(tool, Mapping):
            raise RequestError(f"{where} must be an object, got {shown(tool)}", param=where)
        if tool.get("type") not in (None, "custom"):
            raise RequestError(
                f"{where} is {shown_kind(tool)}; only tools with a name and an input_schema are supported",
                param=f"{where}.type",
                code="unsupported_parameter",
            )
        if tool.get("defer_loading"):
            place = f"{where}.defer_loading"
            raise RequestError(f"{place} is not supported; leave it out", param=place, code="unsupported_parameter")
        if tool.get("input_schema") is None:
            place = f"{where}.input_schema"
            raise RequestError(f"{place} is required", param=place)
        found.append(read_function(tool, where, "input_schema"))
        name = found[-1]["function"]["name"]
        if name in names:
            raise RequestError(f"{where}.name: there are two tools {name!r}", param=f"{where}.name")
        names.add(name)
        marks.add(tool, f"{where}.cache_control", BlockMark(tool=number))
    check_chars(len(json.dumps(found)), "tools")
    return tuple(found)
