"""`/v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError
from afterglow.library.assemble import Piece
from afterglow.request import Request, TokenLogprob
from afterglow.server.access.tenants import RequestRecord
from afterglow.server.bodies.reader import read_body
from afterglow.server.bodies.reply_bodies import ChatBody
from afterglow.server.replies.choice_replies import ChoiceReplies, chat_logprobs, delta_fields, message_fields
from afterglow.server.replies.make_requests import make_requests, with_tool_grammar
from afterglow.server.state import State
from afterglow.text import ChatPrompt
from afterglow.text.tool_calls.parts import Reasoning


async def chat_completions(http: HttpRequest) -> Response:
    """Answer a conversation."""
    state: State = http.app.state.afterglow
    record: RequestRecord = http.scope["afterglow.record"]
    body = await read_body(http, ChatBody)
    state.models.check(body.model)
    if body.messages is None:
        raise RequestError("messages is required", param="messages")
    state.reply_lengths.check_count(body.replies_per_prompt, "n")
    salt = state.tenants.salt(record.caller, body.cache_salt)
    cut = (body.truncation or state.config.chat_truncation) == "auto"
    prompt = await state.prompt_encoder.encode(body, body.messages, salt, size=body.size, cut=cut)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = body.sampling(state.defaults, state.reply_lengths.max_tokens(body, len(prompt.ids), cut), logprobs)
    sampling = with_tool_grammar(state, body.tool_use, sampling, prompt)
    requests = make_requests(http, body, [(prompt.ids, sampling)], salt, cut=cut, turns=prompt.turns)
    return await ChatReplies(state, http, body, requests, prompt).answer()


class ChatReplies(ChoiceReplies):
    """Replies to a conversation."""

    body: ChatBody
    chat: ChatPrompt

    def __init__(
        self, state: State, http: HttpRequest, body: ChatBody, requests: Sequence[Request], chat: ChatPrompt
    ) -> None:
        super().__init__(state, http, body, requests, chat)
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model}

    async def whole(self) -> Response:
        logprobs: list[list[TokenLogprob]] = [[] for _ in self.texts]
        async with aclosing(self.pieces()) as pieces:
            async for index, piece in pieces:
                logprobs[index].extend(piece.logprobs)
        self._remember()
        values = 8 * sum(len(found) for found in logprobs) * (1 + (self.body.top_logprobs or 0))
        size = values + sum(len(reply.text) for reply in self.texts)
        if self.body.return_token_ids:
            size += len(self.chat.ids)
        return await self.state.text_threads.respond(size, lambda: self._describe(logprobs))

    def _describe(self, logprobs: list[list[TokenLogprob]]) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            **self._prompt_ids(),
            "choices": [
                {
                    "index": index,
                    "message": message_fields(
                        reply.content, reply.reasoning if self._thinks_aloud else "", reply.calls
                    ),
                    "logprobs": self._logprobs(logprobs[index]),
                    "finish_reason": reply.reason,
                    **self.ids(reply.tokens),
                }
                for index, reply in enumerate(self.texts)
            ],
            "usage": self.usage(),
        }

    @property
    def _thinks_aloud(self) -> bool:
        return self.body.include_reasoning is not False

    def head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    async def chunk(self, index: int, piece: Piece, first: bool) -> dict[str, Any] | None:
        # The role goes out with the first token, not before: a client's clock stops at the first chunk.
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        shown = piece.parts if self._thinks_aloud else [each for each in piece.parts if not isinstance(each, Reasoning)]
        delta |= delta_fields(shown)
        if piece.finish is not None and index == 0:
            self._remember()
        ids = self.ids(piece.tokens)
        if not (delta or piece.finish or piece.logprobs or ids):
            return None
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(piece.logprobs)}
        return {
            **(self._prompt_ids() if first else {}),
            "choices": [{**choice, "finish_reason": self.texts[index].reason, **ids}],
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self.state.tokenizer, logprobs) if self.body.logprobs else None

    def _prompt_ids(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": self.chat.ids} if self.body.return_token_ids else {}

    def _remember(self) -> None:
        """Remember the first reply for when it comes back as text: a client that asks for several continues one at most."""
        self.state.kept_replies.remember(self.chat, self.requests[0], self.texts[0], write=True)
