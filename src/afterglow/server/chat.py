"""`/v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError
from afterglow.request import TokenLogprob
from afterglow.server.bodies import read_body
from afterglow.server.logprobs import chat_logprobs
from afterglow.server.run import Run
from afterglow.server.schema import ChatBody
from afterglow.server.state import Record, State, Wish
from afterglow.server.stream import DONE, EventStream, event, while_connected
from afterglow.text import ChatPrompt


async def chat_completions(http: HttpRequest) -> Response:
    state: State = http.app.state.afterglow
    record: Record = http.scope["afterglow.record"]
    body = await read_body(http, ChatBody)
    model = state.check_model(body.model)
    if body.messages is None:
        raise RequestError("messages is required", param="messages")
    state.check_replies(body.n or 1, "n")
    salt = state.tenants.salt(record.caller, body.cache_salt)
    cut = (body.truncation or state.config.chat_truncation) == "auto"
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    wish = Wish(wanted, "messages")
    prompt = await state.encode_chat(body.messages, salt, body.chat_template_kwargs, wish, size=body.size, cut=cut)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = body.sampling(state.defaults, state.room_for(prompt.ids, wish, cut), logprobs)
    n = body.n or 1
    choices = state.choices(http, body, [(prompt.ids, sampling)], salt, n=n, cut=cut, turns=prompt.turns)
    run = Run(state, record, choices, n, prompt)
    reply = _Reply(state, body, model, prompt, run)
    if body.stream:
        return EventStream(reply.stream(), run.close)
    try:
        return await while_connected(reply.whole(), http)
    finally:
        run.close()


class _Reply:
    def __init__(self, state: State, body: ChatBody, model: str, prompt: ChatPrompt, run: Run) -> None:
        self._state = state
        self._body = body
        self._prompt = prompt
        self._run = run
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def whole(self) -> Response:
        logprobs: list[list[TokenLogprob]] = [[] for _ in self._run.choices]
        async with aclosing(self._run.pieces()) as pieces:
            async for index, piece in pieces:
                logprobs[index].extend(piece.logprobs)
        self._remember()
        values = 8 * sum(len(found) for found in logprobs) * (1 + (self._body.top_logprobs or 0))
        size = values + sum(len(choice.assembler.text) for choice in self._run.choices)
        if self._body.return_token_ids:
            size += len(self._prompt.ids)
        return await self._state.respond(size, lambda: self._describe(logprobs))

    def _describe(self, logprobs: list[list[TokenLogprob]]) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            **self._prompt_ids(),
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": choice.assembler.text, "refusal": None},
                    "logprobs": self._logprobs(logprobs[index]),
                    "finish_reason": choice.assembler.finish,
                    **self._ids(choice.assembler.tokens),
                }
                for index, choice in enumerate(self._run.choices)
            ],
            "usage": self._run.usage(),
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        async with aclosing(self._run.pieces()) as pieces:
            async for index, piece in pieces:
                # The role goes out with the first token, not before: a client's clock stops at the first
                # chunk.
                delta: dict[str, str] = {}
                more: dict[str, Any] = {}
                if index not in begun:
                    begun.add(index)
                    delta = {"role": "assistant", "content": ""}
                    more = self._prompt_ids()
                if piece.text:
                    delta["content"] = piece.text
                if piece.finish is not None and index == 0:
                    self._remember()
                ids = self._ids(piece.tokens)
                if delta or piece.finish or piece.logprobs or ids:
                    choice = {"index": index, "delta": delta, "logprobs": self._logprobs(piece.logprobs)}
                    yield self._chunk({**choice, "finish_reason": piece.finish, **ids}, more)
        if self._body.include_usage:
            yield event({**self._head, **_CHUNK, "choices": [], "usage": self._run.usage()})
        yield DONE

    def _chunk(self, choice: dict[str, Any], more: dict[str, Any]) -> bytes:
        chunk = {**self._head, **_CHUNK, **more, "choices": [choice]}
        if self._body.include_usage:
            chunk["usage"] = self._run.usage() if self._body.continuous_usage else None
        return event(chunk)

    def _logprobs(self, logprobs: Any) -> dict[str, Any] | None:
        return chat_logprobs(self._state.tokenizer, logprobs) if self._body.logprobs else None

    def _prompt_ids(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": self._prompt.ids} if self._body.return_token_ids else {}

    def _ids(self, tokens: Sequence[int]) -> dict[str, Sequence[int]]:
        return {"token_ids": tokens} if self._body.return_token_ids else {}

    def _remember(self) -> None:
        """For when the reply comes back as text. Of several replies the first: which one goes on, nobody
        knows."""
        first = self._run.choices[0]
        ends = self._state.reply_ends(first.request)
        reply = self._state.tokenizer.remember(self._prompt, first.assembler.text, first.assembler.tokens, ends)
        if reply is not None:
            self._state.keep_reply(self._prompt, reply, first.request, ends)


_CHUNK: dict[str, Any] = {"object": "chat.completion.chunk"}
