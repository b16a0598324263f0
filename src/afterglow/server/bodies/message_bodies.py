"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`, in Anthropic's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import PrivateAttr

from afterglow.errors import RequestError
from afterglow.request import Grammar
from afterglow.server.bodies.grammar_fields import read_format
from afterglow.server.bodies.json_body import Int, Name, Unused, at_most, check_variables, with_effort
from afterglow.server.bodies.limits import MAX_NAME, check_messages, wrong
from afterglow.server.bodies.message_blocks import CacheMarks, last_block, read_message_tools, read_messages
from afterglow.server.bodies.reply_bodies import MAX_STOPS, Body
from afterglow.text.chat_template import shown_kind
from afterglow.text.turns import BlockMark

LEAST_BUDGET = 1024  # tokens for thoughts, as Anthropic has it
# as templates know them
MESSAGE_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
THINKING = ("enabled", "disabled", "adaptive", "between_tools")


class MessagesBody(Body):
    """`/v1/messages`. Once it is checked, `messages` are those of a chat, the system message first."""

    unsupported: ClassVar[Unused] = {"container": (), "mcp_servers": ([],)}
    prompt_field = "messages"
    clamped = True
    counts_only: ClassVar[bool] = False  # no reply is asked for

    max_tokens: Int | None = None
    messages: Any = None
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    stop_sequences: Annotated[list[Name] | None, at_most(MAX_NAME)] = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    _marks: list[tuple[BlockMark, float]] = PrivateAttr(default_factory=list)

    @property
    def marks(self) -> list[tuple[BlockMark, float]]:
        """Return the marked blocks, each with its seconds."""
        return self._marks

    @property
    def reply_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def continues(self) -> bool:
        return bool(self.messages[-1]["role"] == "assistant")

    @property
    def stops(self) -> list[str]:
        return [*(self.stop_sequences or ()), *super().stops]

    @property
    def thoughts_hidden(self) -> bool:
        """Check whether the client wants thoughts to be left out."""
        return (self.thinking or {}).get("display") == "omitted"

    @property
    def template_variables(self) -> Mapping[str, object] | None:
        """Return the variables of the chat template that the request sets."""
        effort = (self.output_config or {}).get("effort")
        thinking = None if self.thinking is None else self.thinking["type"] != "disabled"
        return with_effort(effort and MESSAGE_EFFORTS[effort], thinking, self.chat_template_kwargs)

    def formats(self) -> list[Grammar]:
        return [
            *read_format((self.output_config or {}).get("format"), "output_config.format"),
            *read_format(self.output_format, "output_format"),
        ]

    def check(self) -> None:
        if len(self.stops) > MAX_STOPS or not all(self.stop_sequences or ()):
            raise RequestError(f"stop_sequences must be at most {MAX_STOPS} non-empty strings", param="stop_sequences")
        super().check()
        if not self.counts_only:
            if self.max_tokens is None:
                raise RequestError("max_tokens is required", param="max_tokens")
            if self.max_tokens < 0:
                raise wrong("max_tokens", "must be 0 or more", self.max_tokens)
        variables = check_variables(self.chat_template_kwargs)
        self._check_thinking()
        self._check_effort()
        _check_edits(self.context_management or {})
        user = (self.metadata or {}).get("user_id")
        if not isinstance(user, str | None):
            raise wrong("metadata.user_id", "must be a string", user)
        marks = CacheMarks()
        self._tool_use = read_message_tools(self.tools, self.tool_choice, marks)
        self.messages = read_messages(self.system, self.messages, marks)
        marks.add_last({"cache_control": self.cache_control}, last_block(self.messages))
        self._marks = marks.found
        self._size = check_messages(self.messages) + self._tool_use.size + variables
        self.system = self.tools = None  # they would be pickled twice

    def _check_thinking(self) -> None:
        given = self.thinking
        if given is None:
            return
        kind, display = given.get("type"), given.get("display")
        if kind not in THINKING:
            raise wrong("thinking.type", f"must be one of {', '.join(THINKING)}", kind)
        if display not in (None, "summarized", "omitted"):
            raise wrong("thinking.display", "must be 'summarized' or 'omitted'", display)
        if kind == "enabled":
            budget = given.get("budget_tokens")
            if not isinstance(budget, int) or isinstance(budget, bool) or budget < LEAST_BUDGET:
                raise wrong("thinking.budget_tokens", f"must be {LEAST_BUDGET} or more", budget)

    def _check_effort(self) -> None:
        effort = (self.output_config or {}).get("effort")
        if effort is not None and (not isinstance(effort, str) or effort not in MESSAGE_EFFORTS):
            raise wrong("output_config.effort", f"must be one of {', '.join(MESSAGE_EFFORTS)}", effort)


class CountTokensBody(MessagesBody):
    """`/v1/messages/count_tokens`."""

    counts_only = True


def _check_edits(given: Mapping[str, Any]) -> None:
    """Refuse changes of the conversation that the server would have to make. What only makes room for more need not be done: a
    reply says that it was not, and which old thoughts a model sees is its template's choice. Raises: RequestError."""
    edits = given.get("edits") or []
    if not isinstance(edits, list):
        where = "context_management.edits"
        raise wrong(where, "must be a list", edits)
    for number, edit in enumerate(edits):
        kind = edit.get("type") if isinstance(edit, Mapping) else None
        if not isinstance(kind, str) or not kind.startswith("clear_"):
            where = f"context_management.edits[{number}]"
            raise RequestError(
                f"{where} is {shown_kind(edit)}, which is not supported; leave it out",
                param=where,
                code="unsupported_parameter",
            )
