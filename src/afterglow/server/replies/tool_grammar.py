"""The grammar of a reply that may call tools, and may begin with reasoning."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from afterglow.errors import RequestError
from afterglow.json_schema import ENDLESS, endless
from afterglow.request import Grammar, SamplingParams
from afterglow.server.bodies.tool_fields import ToolUse
from afterglow.server.state import State
from afterglow.text import ChatPrompt
from afterglow.text.tool_calls.forced import forced_grammar

if TYPE_CHECKING:
    from afterglow.engine.grammars.compiler import Grammars


def with_tool_grammar(state: State, use: ToolUse, sampling: SamplingParams, chat: ChatPrompt) -> SamplingParams:
    """Add the grammar of a reply that must be a call. A reply that may be a call, and must follow a schema otherwise, is
    either. Reasoning before it is free."""
    asked = sampling.grammar
    called = _may_be_call(use, asked)
    if called:
        sampling = replace(sampling, grammar=_call_grammar(state, use, asked))
    if sampling.grammar is None or state.reasoning is None:
        return sampling
    before = state.reasoning.before_grammar(chat.text, state.tokenizer.in_grammar, headed=called)
    return replace(sampling, grammar=replace(sampling.grammar, before=before))


def check_grammar(grammars: Grammars, grammar: Grammar | None, use: ToolUse, asked: Grammar | None) -> None:
    """Compile the grammar of a reply. `asked`: the form that the request asks for. May take seconds.

    Raises: RequestError, with the path of the offending field; of a tool's schema, where the grammar was made of tools.
    """
    parts = _parts_of(use, asked) if _may_be_call(use, asked) else []
    for part in parts:
        if part.kind == "json_schema" and (where := endless(json.loads(part.text))) is not None:
            place = part.param + where
            raise RequestError(f"{place}: {ENDLESS}", param=place, code="invalid_grammar")
    try:
        grammars.check(grammar)
    except RequestError:
        for part in parts:
            grammars.check(part)
        raise


def _parts_of(use: ToolUse, asked: Grammar | None) -> list[Grammar]:
    """List the forms of which the grammar of a reply that may be a call is made, each by itself."""
    tools = [
        Grammar("json_schema", json.dumps({"type": "object", **schema}), param=use.path.format(number), lenient=True)
        for number, (name, schema) in enumerate(use.schemas.items())
        if use.name in (None, name)
    ]
    return tools if asked is None else [*tools, asked]


def _may_be_call(use: ToolUse, asked: Grammar | None) -> bool:
    """Tell whether the grammar of a reply is made of tools."""
    return use.forced or (use.parsed and asked is not None and asked.kind == "json_schema")


def _call_grammar(state: State, use: ToolUse, asked: Grammar | None) -> Grammar:
    tools = {name: schema for name, schema in use.schemas.items() if use.name in (None, name)}
    form, mark = state.tool_format, state.tokenizer.in_grammar
    answer = None if use.forced or asked is None else json.loads(asked.text)
    several = use.parallel and use.name is None
    text = forced_grammar(form.written, tools, mark, several=several, newer=form.newer, answer=answer)
    param = "tool_choice" if use.forced or asked is None else asked.param
    return Grammar("grammar", text, param=param)
