"""From prompts to the engine's requests, and the grammars of replies that may call tools or begin with reasoning."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest

from afterglow.errors import RequestError
from afterglow.json_schema import ENDLESS, endless
from afterglow.request import Breakpoint, Grammar, Request, SamplingParams
from afterglow.server.access.tenants import RequestRecord
from afterglow.server.bodies.json_body import check_session
from afterglow.server.bodies.reply_bodies import Body
from afterglow.server.bodies.tool_fields import ToolUse
from afterglow.server.state import State
from afterglow.text import ChatPrompt
from afterglow.text.tool_calls.forced import forced_grammar

if TYPE_CHECKING:
    from afterglow.engine.grammars.compiler import Grammars


def make_requests(
    http: HttpRequest,
    body: Body,
    prompts: Sequence[tuple[Sequence[int], SamplingParams]],
    salt: str,
    *,
    cut: bool = False,
    turns: tuple[int, ...] = (),
    breakpoints: tuple[Breakpoint, ...] = (),
) -> list[Request]:
    """Make a request for each reply, prompt by prompt. `cut`: prompts may be truncated, at `turns`.

    Raises: RequestError, for a priority that the caller may not have, and for a session's name that is none.
    """
    record: RequestRecord = http.scope["afterglow.record"]
    record.caller.check_priority(body.priority or 0)
    session = body.session_id or _header(http, "x-session-id")
    check_session(session)
    cache_key = body.prompt_cache_key
    if cache_key is not None and salt:
        cache_key = f"{salt}/{cache_key}"  # one tenant's requests must not wait for, or go before, another's
    made: list[Request] = []
    for ids, sampling in prompts:
        prompt = list(ids)
        for number in range(body.replies_per_prompt):
            if sampling.seed is not None and number:
                sampling = replace(sampling, seed=(sampling.seed + 1) % 2**63)
            made.append(
                Request(
                    id=uuid.uuid4().hex,
                    prompt=prompt,
                    sampling=sampling,
                    salt=salt,
                    # A conversation has one turn at a time: of several replies, the first is taken for the next one.
                    session_id=None if made else session,
                    priority=body.priority or 0,
                    cache_key=cache_key,
                    ttl_s=body.ttl_s,
                    volatile=body.volatile,
                    truncation=cut,
                    turns=turns,
                    kv_retention=body.kv_retention,
                    breakpoints=breakpoints,
                )
            )
    return made


def _header(http: HttpRequest, name: str) -> str | None:
    """Read a header that clients write in UTF-8, although HTTP says Latin-1."""
    value = http.headers.get(name)
    try:
        return value.encode("latin-1").decode() if value else None
    except UnicodeError:
        return value


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
