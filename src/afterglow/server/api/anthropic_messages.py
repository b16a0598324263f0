"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError
from afterglow.request import Breakpoint, Request
from afterglow.server.access.tenants import RequestRecord
from afterglow.server.bodies.message_bodies import CountTokensBody, MessagesBody
from afterglow.server.bodies.reader import read_body
from afterglow.server.bodies.response_items import new_id
from afterglow.server.error_responses import anthropic_error
from afterglow.server.json import json_response, to_json
from afterglow.server.replies.make_requests import make_requests, with_tool_grammar
from afterglow.server.replies.message_content import Event, MessageContent, as_breakpoints, input_usage, moved
from afterglow.server.replies.pending_replies import Replies
from afterglow.server.state import State
from afterglow.text import ChatPrompt

log = logging.getLogger("afterglow.server")


async def create_message(http: HttpRequest) -> Response:
    """Answer a conversation."""
    state: State = http.app.state.afterglow
    record: RequestRecord = http.scope["afterglow.record"]
    body = await read_body(http, MessagesBody)
    state.models.check(body.model)
    salt = state.tenants.salt(record.caller, body.cache_salt)
    cut = state.config.chat_truncation == "auto"
    marks = [mark for mark, _ in body.marks]
    prompt = await state.prompt_encoder.encode(body, body.messages, salt, size=body.size, cut=cut, marks=marks)
    if not cut and len(prompt.ids) >= state.engine.max_model_len:
        raise RequestError(
            f"prompt is too long: {len(prompt.ids)} tokens > {state.engine.max_model_len - 1} maximum",
            param="messages",
            code="context_length_exceeded",
        )
    sampling = body.sampling(state.defaults, state.reply_lengths.max_tokens(body, len(prompt.ids), cut), None)
    sampling = with_tool_grammar(state, body.tool_use, sampling, prompt)
    breakpoints = as_breakpoints(zip(prompt.marks, (seconds for _, seconds in body.marks), strict=True))
    requests = make_requests(
        http, body, [(prompt.ids, sampling)], salt, cut=cut, turns=prompt.turns, breakpoints=breakpoints
    )
    return await MessageReply(state, http, body, requests, prompt).answer()


async def count_tokens(http: HttpRequest) -> Response:
    """Count the tokens of a conversation, as a request for a reply would have them."""
    state: State = http.app.state.afterglow
    record: RequestRecord = http.scope["afterglow.record"]
    body = await read_body(http, CountTokensBody)
    state.models.check(body.model)
    salt = state.tenants.salt(record.caller, body.cache_salt)
    encode = state.prompt_encoder.encode
    prompt = await encode(body, body.messages, salt, size=body.size, cut=False, limited=False)
    return json_response({"input_tokens": len(prompt.ids)})


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + to_json({"type": kind, **fields}) + b"\n\n"


def _events(found: Iterable[Event]) -> bytes:
    return b"".join(_event(kind, fields) for kind, fields in found)


PING = _event("ping", {})


class MessageReply(Replies):
    """One message under way."""

    body: MessagesBody
    chat: ChatPrompt
    ping: ClassVar[bytes] = PING

    def __init__(
        self, state: State, http: HttpRequest, body: MessagesBody, requests: Sequence[Request], chat: ChatPrompt
    ) -> None:
        super().__init__(state, http, body, requests, chat)
        self._id = new_id("msg")
        self._content = MessageContent(thoughts_hidden=body.thoughts_hidden)

    async def whole(self) -> Response:
        async with aclosing(self.pieces()) as pieces:
            async for _, piece in pieces:
                deque(self._content.add(piece.parts), maxlen=0)
        deque(self._content.finish(), maxlen=0)
        self._remember()
        return await self.state.text_threads.respond(len(self.texts[0].text), self._describe)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        begun = pinged = False
        try:
            async with aclosing(self.pieces()) as pieces:
                async for _, piece in pieces:
                    sent = b""
                    if not begun:
                        # With the first token, not before: only then it is known what was cached.
                        sent, begun = _event("message_start", {"message": self._describe()}), True
                    events = list(self._content.add(piece.parts))
                    if piece.finish is not None:
                        events += self._content.finish()
                        self._remember()
                    sent += _events(events[:1])
                    if events and not pinged:
                        sent, pinged = sent + PING, True
                    sent += _events(events[1:])
                    if sent:
                        yield sent
            yield _events([("message_delta", self._ending()), ("message_stop", {})])
        except RequestError as error:
            yield _event("error", anthropic_error(error, self.record.request_id))
        except Exception:
            log.exception("a stream failed")
            internal = RequestError("internal error", status=500)
            yield _event("error", anthropic_error(internal, self.record.request_id))

    # ---------------------------------------------------------------------------------------------- inside

    def _remember(self) -> None:
        self.state.kept_replies.remember(self.chat, self.requests[0], self.texts[0], write=True)

    def _describe(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self._content.blocks,
            **self._stopped(),
            "usage": self._message_usage(),
            **self._edited(),
        }

    def _ending(self) -> dict[str, Any]:
        return {"delta": self._stopped(), "usage": self._message_usage(), **self._edited()}

    def _edited(self) -> dict[str, Any]:
        """Say which edits were made, where the client asked for any: none."""
        return {"context_management": {"applied_edits": []}} if self.body.context_management is not None else {}

    def _stopped(self) -> dict[str, Any]:
        """Say why the reply ended; nothing yet of a reply that goes on."""
        reply = self.texts[0]
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        reason = reasons[reply.reason] if reply.reason is not None else None
        if reply.finish is not None and reply.stop is not None:
            reason = "stop_sequence"
        elif reason == "max_tokens" and len(reply.tokens) < (self.body.max_tokens or 0):
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": reply.stop if reason == "stop_sequence" else None}

    def _message_usage(self) -> dict[str, Any]:
        usage = self.usage()
        return {
            **input_usage(self.prompt_tokens, self.cached.total, self._breakpoints()),
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            **self.own_usage(),
        }

    def _breakpoints(self) -> Sequence[Breakpoint]:
        """List the breakpoints in the rows of the prompt that were computed or found."""
        request = self.requests[0]
        if not (request.reuse and self.state.engine.config.cache.reuse):
            return ()
        return moved(request.breakpoints, self.texts[0].truncation, request.turns[0] if request.turns else 0)
