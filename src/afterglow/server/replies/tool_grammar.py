"""The grammar of a reply to a request with tools."""

from __future__ import annotations

import json
from dataclasses import replace

from afterglow.request import Grammar, SamplingParams
from afterglow.server.bodies.tool_fields import ToolUse
from afterglow.server.state import State
from afterglow.text.tool_calls.forced import forced_grammar


def with_tool_grammar(state: State, use: ToolUse, sampling: SamplingParams) -> SamplingParams:
    """Add the grammar of a reply that must be a call. A reply that may be a call, and must follow a schema otherwise, is
    either."""
    asked = sampling.grammar
    if not use.forced and not (use.parsed and asked is not None and asked.kind == "json_schema"):
        return sampling
    tools = {name: schema for name, schema in use.schemas.items() if use.name in (None, name)}
    tokenizer, form = state.tokenizer, state.tool_format

    def mark(text: str) -> str:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return f"<[{ids[0]}]>" if len(ids) == 1 and ids[0] in tokenizer.markers.ids else json.dumps(text)

    answer = None if use.forced or asked is None else json.loads(asked.text)
    several = use.parallel and use.name is None
    text = forced_grammar(form.written, tools, mark, several=several, newer=form.newer, answer=answer)
    param = "tool_choice" if use.forced or asked is None else asked.param
    return replace(sampling, grammar=Grammar("grammar", text, param=param))
