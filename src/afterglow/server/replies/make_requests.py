"""From a conversation's messages to the engine's requests: token ids, lengths of prompt and reply, and the grammars of replies that may
call tools or begin with reasoning.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest

from afterglow.errors import RequestError
from afterglow.json_schema import ENDLESS, endless
from afterglow.request import Breakpoint, Grammar, Request, SamplingParams
from afterglow.server.bodies.json_body import check_session
from afterglow.server.bodies.limits import wrong
from afterglow.server.bodies.message_bodies import MessagesBody
from afterglow.server.bodies.reply_bodies import Body, ChatBody, ResponseBody
from afterglow.server.bodies.tool_fields import ToolUse
from afterglow.server.prompts.system_prompts import RegisteredPrompt
from afterglow.server.state import State, state_and_record
from afterglow.text import ChatPrompt, Reply, Tokenizer
from afterglow.text.lengths import LONG
from afterglow.text.messages import check_begun, texts_in
from afterglow.text.tool_calls.formats import forced_grammar
from afterglow.text.turns import TEMPLATE, BlockMark

if TYPE_CHECKING:
    from afterglow.server.bridge import GrammarsLike

log = logging.getLogger("afterglow.server")


def check_count(state: State, count: int, param: str) -> None:
    """Refuse more replies than the queue can hold: a later try would not help. Raises: RequestError."""
    most = state.engine.config.max_queue
    if count > most:
        raise RequestError(
            f"{count} replies were asked for at once, and this server's queue holds {most} (--max-queue); "
            "ask for them in several requests",
            param=param,
        )


def max_tokens(state: State, body: Body, rows: int, cut: bool = False) -> int:
    """Count the tokens that may be generated after a prompt of `rows` tokens. `cut`: the engine may truncate the prompt.

    Raises: RequestError, if prompt and reply do not fit the context.
    """
    window, asked, wanted = state.window, body.reply_tokens, _wanted(state, body)
    if rows == 0:
        raise RequestError("the prompt is empty", param=body.prompt_field)
    if asked is not None and asked < 0:
        raise wrong(body.tokens_field, "must be 0 or more", asked)
    if cut:
        if asked is not None and asked >= window.limit and not body.clamped:
            raise window.error(f"{asked} were asked for the reply alone", body.tokens_field)
        # A truncated prompt's length is known later: the engine ends the reply.
        return min(wanted, window.room(rows if window.fits(rows, wanted) else 1))
    window.refuse(rows, 1 if asked is None else asked, param=body.prompt_field)
    if asked is not None and asked > window.room(rows) and not body.clamped:
        raise window.error(
            f"{rows + asked} were asked for: {rows} in the prompt and {asked} for the reply", body.tokens_field
        )
    return min(wanted, window.room(rows))


def _wanted(state: State, body: Body) -> int:
    """Choose a reply's length: the request's, else the least of its endpoint's and its model's, else the whole context."""
    if body.reply_tokens is not None:
        return body.reply_tokens
    found = [n for n in (body.default_tokens, state.defaults.max_new_tokens) if n is not None]
    return min(found, default=state.window.limit)


async def encode(
    http: HttpRequest,
    body: ChatBody | ResponseBody | MessagesBody,
    messages: Any,
    *,
    size: int,
    cut: bool,
    replies: Mapping[int, Reply] | None = None,
    marks: Sequence[BlockMark] = (),
    limited: bool = True,
) -> ChatPrompt:
    """Render and tokenise the conversation of a request, behind the system prompt that is registered for it. `size`: how much work
    that is, in characters. `cut`: the engine truncates a prompt that is too long, and is told its turns; otherwise such a prompt is
    an error, unless it is not `limited`. `marks`: of blocks of `messages`.

    Raises: RequestError.
    """
    state, record = state_and_record(http)
    tokenizer, prompts = state.tokenizer, state.system_prompts
    salt = state.tenants.salt(record.caller, body.cache_salt)
    variables = body.template_variables
    tools = body.tool_use.tools

    def work() -> tuple[ChatPrompt, RegisteredPrompt | None]:
        tokenizer.check_roles(messages)  # by the client's numbers
        if body.continues:
            check_begun(messages)
        begun, known, registered = prompts.begin(messages, salt, replies)
        shift = len(begun) - len(messages) if marks else 0
        found = tokenizer.encode_chat(
            begun,
            salt=salt,
            tools=tools,
            continue_final_message=body.continues,
            variables=variables,
            replies=known,
            cut_over=state.window.longest(_wanted(state, body)) if cut else None,
            window=None if cut or not limited else state.window,
            marks=[replace(mark, message=mark.message + shift) for mark in marks],
        )
        return found, registered

    size *= 1 + len(marks)  # to find them is to render anew
    own = prompts.texts(salt)
    size = work_of(tokenizer, size + sum(map(len, own)), chain(texts_in(messages), own), tools)
    try:
        prompt, registered = await state.text_threads.run(size, work)
    except RequestError as error:
        if error.param == "messages":
            error.param = body.prompt_field
        raise
    if prompt.uncut == TEMPLATE and not state.warned_uncut:
        state.warned_uncut = True
        log.warning("truncation: %s; the oldest tokens after the system prompt are left out instead", TEMPLATE)
    if registered is not None and not variables and not tools:
        prompts.used(registered, prompt.ids)
    return prompt


def work_of(tokenizer: Tokenizer, size: int, texts: Iterable[str], tools: Sequence[Mapping[str, Any]]) -> int:
    """Return how much work a conversation is, where its length alone makes it `size`: a marker in its texts or its tools may need
    another tokenizer, whose construction takes seconds once."""
    if size > LONG:
        return size
    marked = any(map(tokenizer.markers.mentioned_in, texts)) or tokenizer.markers.mentioned(tools)
    return LONG + 1 if marked else size


def chat_requests(
    http: HttpRequest,
    body: Body,
    prompt: ChatPrompt,
    *,
    cut: bool,
    logprobs: int | None = None,
    breakpoints: tuple[Breakpoint, ...] = (),
) -> list[Request]:
    """Make a request for each reply to a conversation. `cut`: the engine may truncate the prompt. `logprobs`: alternatives for each
    token; None: no log-probabilities. Raises: RequestError.
    """
    state, _ = state_and_record(http)
    sampling = body.sampling(state.defaults, max_tokens(state, body, len(prompt.ids), cut), logprobs)
    sampling = with_tool_grammar(state, body.tool_use, sampling, prompt)
    chosen = [(prompt.ids, sampling)]
    return make_requests(http, body, chosen, prompt.salt, cut=cut, turns=prompt.turns, breakpoints=breakpoints)


def make_requests(
    http: HttpRequest,
    body: Body,
    prompts: Sequence[tuple[list[int], SamplingParams]],
    salt: str,
    *,
    cut: bool = False,
    turns: tuple[int, ...] = (),
    breakpoints: tuple[Breakpoint, ...] = (),
) -> list[Request]:
    """Make a request for each reply, prompt by prompt. `cut`: prompts may be truncated, at `turns`.

    Raises: RequestError, for a priority that the caller may not have, and for a session's name that is none.
    """
    _, record = state_and_record(http)
    record.caller.check_priority(body.priority or 0)
    session = body.session_id or _header(http, "x-session-id")
    check_session(session)
    cache_key = body.prompt_cache_key
    if cache_key is not None and salt:
        cache_key = f"{salt}/{cache_key}"  # one tenant's requests must not wait for, or go before, another's
    made: list[Request] = []
    for prompt, sampling in prompts:
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
    mark, beginning = state.tokenizer.in_grammar, chat.beginning
    before = state.reasoning.before_grammar(chat.text, mark, headed=called, beginning=beginning)
    return replace(sampling, grammar=replace(sampling.grammar, before=before))


def check_grammar(grammars: GrammarsLike, grammar: Grammar | None, use: ToolUse, asked: Grammar | None) -> None:
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
