"""`/v1/completions`: text in, text out, and the log-likelihoods that evaluation harnesses ask for."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError
from afterglow.server.assemble import Piece
from afterglow.server.bodies import read_body
from afterglow.server.logprobs import CompletionLogprobs, join
from afterglow.server.run import Run
from afterglow.server.schema import CompletionBody
from afterglow.server.state import Record, State, Wish
from afterglow.server.stream import DONE, EventStream, event, while_connected
from afterglow.text.chat import shown

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Prompt:
    ids: list[int]
    text: str | None  # None: it was given as ids


async def completions(http: HttpRequest) -> Response:
    state: State = http.app.state.afterglow
    record: Record = http.scope["afterglow.record"]
    body = await read_body(http, CompletionBody)
    model = state.check_model(body.model)
    prompts = await _prompts(state, body)
    jobs = []
    for prompt in prompts:
        room = state.room_for(prompt.ids, Wish(body.max_tokens, "prompt", default=DEFAULT_MAX_TOKENS))
        sampling = body.sampling(state.defaults, room, body.logprobs)
        if body.echo and body.logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=body.logprobs)
        jobs.append((prompt.ids, sampling))
    n = body.n or 1
    choices = state.choices(http, body, jobs, state.tenants.salt(record.caller, body.cache_salt), n=n)
    run = Run(state, record, choices, n)
    reply = _Reply(state, body, model, prompts, run)
    if body.stream:
        return EventStream(reply.stream(), run.close)
    try:
        return await while_connected(reply.whole(), http)
    finally:
        run.close()


async def _prompts(state: State, body: CompletionBody) -> list[_Prompt]:
    items: list[Any] = body.prompt
    tokenizer = state.tokenizer
    state.check_replies(len(items) * (body.n or 1), "prompt" if len(items) > 1 else "n")

    for item in items:
        if isinstance(item, str):
            tokenizer.check_length(item, state.engine.max_model_len, "prompt")

    def encode() -> list[_Prompt]:
        return [
            _Prompt(tokenizer.encode(item, add_special_tokens=body.add_special_tokens), item)
            if isinstance(item, str)
            else _Prompt(item, None)
            for item in items
        ]

    found = await state.tokenise(sum(map(len, items)), encode)
    for prompt in found:
        if prompt.text is None and not 0 <= min(prompt.ids) <= max(prompt.ids) < state.engine.vocab_size:
            bad = next(i for i in prompt.ids if not 0 <= i < state.engine.vocab_size)
            raise RequestError(
                f"prompt: token id {shown(bad)} is outside the vocabulary of {state.engine.vocab_size} tokens",
                param="prompt",
            )
    return found


class _Reply:
    def __init__(self, state: State, body: CompletionBody, model: str, prompts: Sequence[_Prompt], run: Run) -> None:
        self._state = state
        self._tokenizer = state.tokenizer
        self._body = body
        self._prompts = prompts
        self._run = run
        self._logprobs = [CompletionLogprobs(state.tokenizer) for _ in run.choices]
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> Response:
        parts: list[list[dict[str, Any]]] = [[] for _ in self._run.choices]
        texts = [""] * len(parts)
        async with aclosing(self._run.pieces()) as pieces:
            async for index, piece in pieces:
                text, logprobs = await self._part(index, piece, first=not parts[index])
                texts[index] += text
                parts[index].append(logprobs)
        tokens = sum(len(part["tokens"]) for found in parts for part in found)
        size = sum(map(len, texts)) + tokens * self._values
        if self._body.return_token_ids:
            size += sum(len(choice.request.prompt) + len(choice.assembler.tokens) for choice in self._run.choices)
        return await self._state.respond(size, lambda: self._describe(texts, parts))

    def _describe(self, texts: list[str], parts: list[list[dict[str, Any]]]) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [
                self._choice(index, texts[index], choice.assembler.finish, join(parts[index]))
                | self._ids(index, choice.assembler.tokens, first=True)
                for index, choice in enumerate(self._run.choices)
            ],
            "usage": self._run.usage(),
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        async with aclosing(self._run.pieces()) as pieces:
            async for index, piece in pieces:
                first = index not in begun
                text, logprobs = await self._part(index, piece, first)
                ids = self._ids(index, piece.tokens, first)
                begun.add(index)
                if not (text or piece.finish or logprobs["tokens"] or ids):
                    continue
                chunk = {**self._head, "choices": [self._choice(index, text, piece.finish, logprobs) | ids]}
                if self._body.include_usage:
                    chunk["usage"] = self._run.usage() if self._body.continuous_usage else None
                yield event(chunk)
        if self._body.include_usage:
            yield event({**self._head, "choices": [], "usage": self._run.usage()})
        yield DONE

    @property
    def _values(self) -> int:
        """About how many values there are for each token."""
        return 4 * (1 + (self._body.logprobs or 0))

    async def _part(self, index: int, piece: Piece, first: bool) -> tuple[str, dict[str, Any]]:
        """Text and log-probabilities of a piece; the first one carries the echo."""
        size = 0
        if first and self._body.echo:
            size = len(self._prompts[index // (self._body.n or 1)].ids) * self._values
        return await self._state.tokenise(size, lambda: self._write(index, piece, first))

    def _write(self, index: int, piece: Piece, first: bool) -> tuple[str, dict[str, Any]]:
        body, lists = self._body, self._logprobs[index]
        text, parts = piece.text, []
        if first and body.echo:
            prompt = self._prompts[index // (body.n or 1)]
            echo = self._tokenizer.decode(prompt.ids, False) if prompt.text is None else prompt.text
            text = echo + text
            if body.logprobs is not None:
                parts.append(lists.prompt(prompt.ids, self._run.choices[index].assembler.prompt_logprobs))
        if body.logprobs is not None:
            parts.append(lists.reply(piece.logprobs))
        return text, join(parts)

    def _ids(self, index: int, tokens: Sequence[int], first: bool) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": self._run.choices[index].request.prompt} if first else {}
        return {**prompt, "token_ids": tokens}

    def _choice(self, index: int, text: str, finish: str | None, logprobs: dict[str, Any]) -> dict[str, Any]:
        shown = logprobs if self._body.logprobs is not None else None
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": finish}
