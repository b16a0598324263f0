"""`/v1/completions`: text in, text out, and the log-likelihoods that evaluation harnesses ask for."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError
from afterglow.library.assemble import Piece
from afterglow.request import Request
from afterglow.server.access.tenants import RequestRecord
from afterglow.server.bodies.reader import read_body
from afterglow.server.bodies.reply_bodies import CompletionBody
from afterglow.server.replies.choice_replies import ChoiceReplies, CompletionLogprobs, join
from afterglow.server.replies.make_requests import make_requests
from afterglow.server.state import State
from afterglow.text.chat_template import shown


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt of `/v1/completions`. `text`: None where it came as ids."""

    ids: list[int]
    text: str | None


async def completions(http: HttpRequest) -> Response:
    """Continue texts."""
    state: State = http.app.state.afterglow
    record: RequestRecord = http.scope["afterglow.record"]
    body = await read_body(http, CompletionBody)
    state.models.check(body.model)
    prompts = await _prompts(state, body)
    made = []
    for prompt in prompts:
        sampling = body.sampling(state.defaults, state.reply_lengths.max_tokens(body, len(prompt.ids)), body.logprobs)
        if body.echo and body.logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=body.logprobs)
        made.append((prompt.ids, sampling))
    requests = make_requests(http, body, made, state.tenants.salt(record.caller, body.cache_salt))
    return await CompletionReplies(state, http, body, requests, prompts).answer()


async def _prompts(state: State, body: CompletionBody) -> list[TextPrompt]:
    """Tokenise the prompts that are texts, and check those that are ids. Raises: RequestError."""
    items: list[Any] = body.prompt
    tokenizer = state.tokenizer
    state.reply_lengths.check_count(len(items) * body.replies_per_prompt, "prompt" if len(items) > 1 else "n")

    for item in items:
        if isinstance(item, str):
            tokenizer.check_length(item, state.reply_lengths.window, "prompt")

    def encode() -> list[TextPrompt]:
        return [
            TextPrompt(tokenizer.encode(item, add_special_tokens=body.add_special_tokens), item)
            if isinstance(item, str)
            else TextPrompt(item, None)
            for item in items
        ]

    found = await state.text_threads.run(sum(map(len, items)), encode)
    for prompt in found:
        if prompt.text is None and not 0 <= min(prompt.ids) <= max(prompt.ids) < state.engine.vocab_size:
            bad = next(i for i in prompt.ids if not 0 <= i < state.engine.vocab_size)
            raise RequestError(
                f"prompt: token id {shown(bad)} is outside the vocabulary of {state.engine.vocab_size} tokens",
                param="prompt",
            )
    return found


class CompletionReplies(ChoiceReplies):
    """Replies to texts."""

    body: CompletionBody

    def __init__(
        self,
        state: State,
        http: HttpRequest,
        body: CompletionBody,
        requests: Sequence[Request],
        prompts: Sequence[TextPrompt],
    ) -> None:
        super().__init__(state, http, body, requests)
        self._prompts = prompts
        self._logprobs = [CompletionLogprobs(state.tokenizer) for _ in requests]
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model,
        }

    async def whole(self) -> Response:
        parts: list[list[dict[str, Any]]] = [[] for _ in self.texts]
        written = [""] * len(parts)
        async with aclosing(self.pieces()) as pieces:
            async for index, piece in pieces:
                text, logprobs = await self._part(index, piece, first=not parts[index])
                written[index] += text
                parts[index].append(logprobs)
        tokens = sum(len(part["tokens"]) for found in parts for part in found)
        size = sum(map(len, written)) + tokens * self._values
        if self.body.return_token_ids:
            size += sum(len(request.prompt) for request in self.requests) + sum(len(t.tokens) for t in self.texts)
        return await self.state.text_threads.respond(size, lambda: self._describe(written, parts))

    def _describe(self, written: list[str], parts: list[list[dict[str, Any]]]) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [
                self._choice(index, written[index], reply.finish, join(parts[index]))
                | self.ids(reply.tokens, self.requests[index].prompt)
                for index, reply in enumerate(self.texts)
            ],
            "usage": self.usage(),
        }

    def head(self) -> dict[str, Any]:
        return self._head

    async def chunk(self, index: int, piece: Piece, first: bool) -> dict[str, Any] | None:
        text, logprobs = await self._part(index, piece, first)
        ids = self.ids(piece.tokens, self.requests[index].prompt if first else None)
        if not (text or piece.finish or logprobs["tokens"] or ids):
            return None
        return {"choices": [self._choice(index, text, piece.finish, logprobs) | ids]}

    @property
    def _values(self) -> int:
        """About how many values there are for each token."""
        return 4 * (1 + (self.body.logprobs or 0))

    async def _part(self, index: int, piece: Piece, first: bool) -> tuple[str, dict[str, Any]]:
        """Return text and log-probabilities of a piece; the first one carries the echo."""
        echoes = first and self.body.echo
        size = len(self.requests[index].prompt) * self._values if echoes else 0
        return await self.state.text_threads.run(size, lambda: self._write(index, piece, first))

    def _write(self, index: int, piece: Piece, first: bool) -> tuple[str, dict[str, Any]]:
        body, lists = self.body, self._logprobs[index]
        text, parts = piece.text, []
        if first and body.echo:
            prompt = self._prompts[index // body.replies_per_prompt]
            echo = self.state.tokenizer.decode(prompt.ids, False) if prompt.text is None else prompt.text
            text = echo + text
            if body.logprobs is not None:
                parts.append(lists.prompt(prompt.ids, self.texts[index].prompt_logprobs))
        if body.logprobs is not None:
            parts.append(lists.reply(piece.logprobs))
        return text, join(parts)

    def _choice(self, index: int, text: str, finish: str | None, logprobs: dict[str, Any]) -> dict[str, Any]:
        lists = logprobs if self.body.logprobs is not None else None
        return {"index": index, "text": text, "logprobs": lists, "finish_reason": finish}
