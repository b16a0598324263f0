"""Messages and tools in Anthropic's form, turned into those of a chat, and the field `cache_control` of their blocks.

A message is a list of blocks: text, calls (`tool_use`), results (`tool_result`), thoughts. Results are messages of their own in a
chat, and messages of one role that follow each other are one turn.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from afterglow.errors import RequestError
from afterglow.request import MAX_BREAKPOINTS
from afterglow.server.bodies.limits import MAX_MESSAGES, unsupported, wrong
from afterglow.server.bodies.tool_fields import ToolUse, read_function, read_tools
from afterglow.text.chat_template import shown, shown_kind
from afterglow.text.messages import MAX_CALLS, check_begun
from afterglow.text.turns import BlockMark

LIFETIMES = {"5m": 300.0, "1h": 3600.0}  # seconds


class CacheMarks:
    """Collects the marks of a request, each with its seconds."""

    def __init__(self) -> None:
        self.found: list[tuple[BlockMark, float]] = []

    def add(self, block: Mapping[str, Any], where: str, mark: BlockMark) -> None:
        """Add the mark of a block, if it has one. Raises: RequestError."""
        if (seconds := read_lifetime(block, where)) is None:
            return
        if len(self.found) == MAX_BREAKPOINTS:
            raise RequestError(
                f"{where}: at most {MAX_BREAKPOINTS} blocks may be marked with cache_control, and this is one more",
                param=where,
            )
        self.found.append((mark, seconds))

    def add_last(self, body: Mapping[str, Any], mark: BlockMark) -> None:
        """Add the mark that the whole request asks for: of its last block. Raises: RequestError."""
        own = next((seconds for known, seconds in self.found if known == mark), None)
        if own is None:
            self.add(body, "cache_control", mark)
        elif read_lifetime(body, "cache_control") not in (None, own):
            raise RequestError(
                "cache_control.ttl: the last block is marked with another ttl; give one of them",
                param="cache_control.ttl",
            )


def read_lifetime(block: Mapping[str, Any], where: str) -> float | None:
    """Read the seconds of a block's mark; None without one. `where`: the path of the field. Raises: RequestError."""
    given = block.get("cache_control")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise wrong(where, "must be an object", given)
    if given.get("type") != "ephemeral":
        raise wrong(f"{where}.type", "must be 'ephemeral'", given.get("type"))
    ttl = given.get("ttl")
    if ttl is None:
        ttl = "5m"
    if not isinstance(ttl, str) or ttl not in LIFETIMES:
        raise wrong(f"{where}.ttl", "must be '5m' or '1h'", ttl)
    return LIFETIMES[ttl]


Block = tuple[Mapping[str, Any], str]  # with its path
ROLES = ("user", "assistant", "system")
TEXT_ONLY = "this server reads text, and blocks of type {} alone"
# Claude Code begins the first line so. It is another one in each request, and no prompt would be found in the cache.
ACCOUNTING = "x-anthropic-billing-header:"
ERROR = "Error: "  # before a result that says is_error: templates know no field for it


class ChatWriter:
    """Collects the messages of a chat, block by block. `marks`: where the marked blocks ended up."""

    def __init__(self, marks: CacheMarks) -> None:
        self.messages: list[dict[str, Any]] = []
        self.marks = marks
        self._texts: list[list[str]] = []  # of which the contents consist: joined in the end, as there may be thousands
        self._chars: list[int] = []  # their lengths
        self._blocks = 0
        self._open: dict[str, bool] = {}  # calls by id: whether they wait for a result,
        self._callers: dict[str, int] = {}  # and the number of their message

    def system(self, given: object) -> None:
        """Add the field `system`. Raises: RequestError."""
        if given is None or given == "" or given == []:
            return
        for block, where in self._count(_blocks(given, "system")):
            text = _text_of(block, where, "'text'")
            rest = text.partition("\n")[2].lstrip("\n") if text.startswith(ACCOUNTING) else text
            if rest or rest == text:
                self._text("system", rest, block, where)

    def message(self, given: object, where: str) -> None:
        """Add a message. Raises: RequestError, with the path of the mistake."""
        if not isinstance(given, Mapping):
            raise wrong(where, "must be an object with role and content", given)
        role = given.get("role")
        if role not in ROLES:
            raise wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}", role)
        read = {"user": self._user, "assistant": self._assistant, "system": self._more_system}[role]
        blocks = _blocks(given.get("content"), f"{where}.content")
        if role == "assistant" and (not self.messages or self.messages[-1]["role"] != "assistant"):
            self._begin({"role": "assistant"})
        for block, place in self._count(blocks):
            read(block, place)

    def finish(self) -> list[dict[str, Any]]:
        """Return the messages."""
        for message, texts in zip(self.messages, self._texts, strict=True):
            message["content"] = "".join(texts)
            if "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])
        return self.messages

    # ------------------------------------------------------------------------------------------------ blocks

    def _user(self, block: Mapping[str, Any], where: str) -> None:
        if block.get("type") == "tool_result":
            self._result(block, where)
        else:
            self._text("user", _text_of(block, where, "'text' and 'tool_result'"), block, where)

    def _more_system(self, block: Mapping[str, Any], where: str) -> None:
        self._text("system", _text_of(block, where, "'text'"), block, where)

    def _assistant(self, block: Mapping[str, Any], where: str) -> None:
        message, kind = self.messages[-1], block.get("type")
        if kind in ("thinking", "redacted_thinking"):
            if block.get("cache_control") is not None:
                place = f"{where}.cache_control"
                raise RequestError(f"{place}: thoughts cannot be marked; mark the block behind them", param=place)
            if kind == "thinking":  # what is redacted only its author can read
                thought = _string(block, "thinking", where)
                message.setdefault("reasoning_content", []).append(thought)
        elif kind == "tool_use":
            self._call(message, block, where)
        else:
            self._append(_text_of(block, where, "'text', 'tool_use' and 'thinking'"))
            self._mark(block, where, self._end())

    def _call(self, message: dict[str, Any], block: Mapping[str, Any], where: str) -> None:
        name, tool, given = _string(block, "id", where), _string(block, "name", where), block.get("input")
        if not name or not tool:
            place = f"{where}.{'name' if name else 'id'}"
            raise RequestError(f"{place} must not be empty", param=place)
        if not isinstance(given, Mapping):
            raise wrong(f"{where}.input", "must be an object", given)
        calls, number = message.setdefault("tool_calls", []), len(self.messages) - 1
        if self._callers.get(name) == number:
            raise RequestError(f"{where}.id: {name[:80]!r} is the id of two calls", param=f"{where}.id")
        if len(calls) == MAX_CALLS:
            raise RequestError(f"{where}: at most {MAX_CALLS} calls are read in a message", param=where)
        self._open[name], self._callers[name] = True, number
        said = {"name": tool, "arguments": json.dumps(given, ensure_ascii=False)}
        calls.append({"id": name, "type": "function", "function": said})
        self._mark(block, where, BlockMark(number))

    def _result(self, block: Mapping[str, Any], where: str) -> None:
        place = f"{where}.tool_use_id"
        name, failed = _string(block, "tool_use_id", where), block.get("is_error")
        if name not in self._open:
            raise RequestError(f"{place}: no tool_use block before it has the id {name[:80]!r}", param=place)
        if not self._open[name]:
            raise RequestError(f"{place}: the call {name[:80]!r} has a result already", param=place)
        if not isinstance(failed, bool | None):
            raise wrong(f"{where}.is_error", "must be true or false", failed)
        self._open[name] = False
        self._begin({"role": "tool", "tool_call_id": name})
        if failed:
            self._append(ERROR)
        content = block.get("content")
        blocks = _blocks(content, f"{where}.content") if content is not None else iter(())
        for number, (part, inside) in enumerate(self._count(blocks)):
            self._append(_text_of(part, inside, "'text'"), "\n" if number else "")
            self._mark(part, inside, self._end())
        self._mark(block, where, self._end())

    def _text(self, role: str, text: str, block: Mapping[str, Any], where: str) -> None:
        follows = bool(self.messages) and self.messages[-1]["role"] == role
        if not follows:
            self._begin({"role": role})
        self._append(text, "\n" if follows else "")
        self._mark(block, where, self._end())

    def _begin(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._texts.append([])
        self._chars.append(0)

    def _append(self, text: str, between: str = "") -> None:
        self._texts[-1] += (between, text)
        self._chars[-1] += len(between) + len(text)

    def _end(self) -> BlockMark:
        return BlockMark(len(self.messages) - 1, self._chars[-1])

    def _count(self, blocks: Iterator[Block]) -> Iterator[Block]:
        for block in blocks:
            self._blocks += 1
            if self._blocks > MAX_MESSAGES:
                raise RequestError(
                    f"messages: at most {MAX_MESSAGES} blocks are read at once; leave the oldest out, or join them",
                    param="messages",
                    code="context_length_exceeded",
                )
            yield block

    def _mark(self, block: Mapping[str, Any], where: str, mark: BlockMark) -> None:
        self.marks.add(block, f"{where}.cache_control", mark)


def read_messages(system: object, messages: object, marks: CacheMarks) -> list[dict[str, Any]]:
    """Turn the fields `system` and `messages` into the messages of a chat; adds the marks of their blocks.

    Raises: RequestError, with the path of the mistake.
    """
    if messages is None:
        raise RequestError("messages is required", param="messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", param="messages")
    writer = ChatWriter(marks)
    writer.system(system)
    for number, message in enumerate(messages):
        writer.message(message, f"messages[{number}]")
    begun = messages[-1]["role"] == "assistant"  # the reply goes on from there
    if not writer.messages or (writer.messages[-1]["role"] == "assistant") != begun:
        raise RequestError("messages: the last message has no content", param="messages")
    found = writer.finish()
    if begun:
        check_begun(found, f"messages[{len(messages) - 1}]")
    return found


def last_block(messages: list[dict[str, Any]]) -> BlockMark:
    """Return the mark of the last block."""
    return BlockMark(len(messages) - 1, len(messages[-1]["content"]))


def _blocks(content: object, where: str) -> Iterator[Block]:
    """Yield the blocks of a content with their paths; a string is one block. Raises: RequestError."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, where
        return
    if not isinstance(content, list):
        raise wrong(where, "must be a string or a list of blocks", content)
    for number, block in enumerate(content):
        place = f"{where}[{number}]"
        if not isinstance(block, Mapping):
            raise wrong(place, "must be a block, which is an object", block)
        yield block, place


def _text_of(block: Mapping[str, Any], where: str, known: str) -> str:
    if block.get("type") != "text":
        raise RequestError(
            f"{where} is {shown_kind(block)}; {TEXT_ONLY.format(known)}", param=where, code="unsupported_parameter"
        )
    text = _string(block, "text", where)
    if not text and block.get("cache_control") is not None:
        raise RequestError(f"{where}.cache_control: an empty text cannot be marked", param=f"{where}.cache_control")
    return text


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    given = block.get(name)
    if not isinstance(given, str):
        raise wrong(f"{where}.{name}", "must be a string", given)
    return given


_CHOICES: Mapping[str, Literal["none", "auto", "required"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}
_PATH = "tools[{}].input_schema"


def read_message_tools(tools: object, choice: object, marks: CacheMarks) -> ToolUse:
    """Read both fields; adds the marks of tools. Raises: RequestError, with the path of the mistake."""
    counted = itertools.count()

    def read(tool: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
        if tool.get("type") not in (None, "custom"):
            raise RequestError(
                f"{where} is {shown_kind(tool)}; only tools with a name and an input_schema are supported",
                param=f"{where}.type",
                code="unsupported_parameter",
            )
        if tool.get("defer_loading"):
            raise unsupported(f"{where}.defer_loading")
        if tool.get("input_schema") is None:
            place = f"{where}.input_schema"
            raise RequestError(f"{place} is required", param=place)
        found = read_function(tool, where, "input_schema")
        marks.add(tool, f"{where}.cache_control", BlockMark(tool=next(counted)))
        return found, where

    found = read_tools(tools, read)
    if choice is None:
        return ToolUse(found, path=_PATH)
    if not isinstance(choice, Mapping):
        raise wrong("tool_choice", "must be an object with a type", choice)
    kind, single = choice.get("type"), choice.get("disable_parallel_tool_use")
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise wrong("tool_choice.type", "must be 'auto', 'any', 'tool' or 'none'", kind)
    if not isinstance(single, bool | None):
        where = "tool_choice.disable_parallel_tool_use"
        raise wrong(where, "must be true or false", single)
    if kind == "any" and not found:
        raise RequestError("tool_choice.type: 'any' needs tools", param="tool_choice.type")
    name = choice.get("name") if kind == "tool" else None
    if kind == "tool" and name not in [tool["function"]["name"] for tool in found]:
        raise RequestError(f"tool_choice.name: there is no tool {shown(name)} in tools", param="tool_choice.name")
    return ToolUse(found, _CHOICES[kind], name, not single, _PATH)
