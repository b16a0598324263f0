"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API. The blocks of a reply as they grow, with the events of a stream, and
the tokens as Anthropic counts them.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from pydantic_core import from_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError
from afterglow.request import Breakpoint, CallDelta, Content, Part, Reasoning, Request, ToolCall, Truncation
from afterglow.server.bodies.message_bodies import CountTokensBody, MessagesBody
from afterglow.server.bodies.reader import read_body
from afterglow.server.json_responses import anthropic_error, json_response, to_json
from afterglow.server.replies.make_requests import chat_requests, encode
from afterglow.server.replies.pending_replies import Replies
from afterglow.server.state import state_and_record
from afterglow.text import ChatPrompt

Event = tuple[str, dict[str, Any]]  # its type and fields


class MessageContent:
    """Collects the parts of a reply as blocks. Each call returns its events, in order."""

    def __init__(self, *, thoughts_hidden: bool = False) -> None:
        """`thoughts_hidden`: blocks of thoughts are empty."""
        self.blocks: list[dict[str, Any]] = []  # that are done
        self._hidden = thoughts_hidden
        self._kind = ""  # of the block that grows; empty without one
        self._text = ""  # of a block that grows
        self._call: ToolCall | None = None  # that grows

    def add(self, parts: Iterable[Part]) -> Iterator[Event]:
        """Add parts of the reply."""
        for part in parts:
            if isinstance(part, CallDelta):
                yield from self._add_call(part)
            elif isinstance(part, Reasoning):
                yield from self._add_text("thinking", part.text)
            else:
                assert isinstance(part, Content)
                yield from self._add_text("text", part.text)

    def finish(self) -> Iterator[Event]:
        """End the block that grows."""
        if not self._kind:
            return
        if self._kind == "thinking":
            yield self._delta("signature_delta", "signature", _signature(self._text))
        yield "content_block_stop", {"index": len(self.blocks)}
        self.blocks.append(self._block(whole=True))
        self._kind, self._text, self._call = "", "", None

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if self._kind != kind:
            yield from self._begin(kind)
        self._text += text
        if kind == "text" or not self._hidden:
            yield self._delta(f"{kind}_delta", kind, text)

    def _add_call(self, part: CallDelta) -> Iterator[Event]:
        if part.first:
            yield from self._begin("tool_use", part.call)
        if part.arguments:
            yield self._delta("input_json_delta", "partial_json", part.arguments)

    def _begin(self, kind: str, call: ToolCall | None = None) -> Iterator[Event]:
        yield from self.finish()
        self._kind, self._call = kind, call
        yield "content_block_start", {"index": len(self.blocks), "content_block": self._block(whole=False)}

    def _delta(self, kind: str, field: str, text: str) -> Event:
        return "content_block_delta", {"index": len(self.blocks), "delta": {"type": kind, field: text}}

    def _block(self, *, whole: bool) -> dict[str, Any]:
        """Describe the block that grows: as it begins, or as a `whole`."""
        if self._kind == "text":
            return {"type": "text", "text": self._text}
        if self._kind == "thinking":
            shown = "" if self._hidden else self._text
            return {"type": "thinking", "thinking": shown, "signature": _signature(self._text) if whole else ""}
        assert self._call is not None
        said = _input(self._call.arguments) if whole else {}
        return {"type": "tool_use", "id": self._call.id, "name": self._call.name, "input": said}


def _signature(thought: str) -> str:
    """Name a thought. Clients must find a signature; it is not checked when it comes back."""
    return hashlib.blake2b(thought.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _input(arguments: str) -> dict[str, Any]:
    """Read the arguments of a call; of a call that is cut short, what is there. What is no object is given as text, by the name
    that Anthropic recommends."""
    for partial in ("off", "trailing-strings"):
        try:
            found = from_json(arguments, allow_partial=partial)
        except ValueError:
            continue
        if isinstance(found, dict) and _is_json(found):
            return found
    return {"INVALID_JSON": arguments} if arguments.strip() else {}


def _is_json(value: object) -> bool:
    """Check that a value can be written as JSON: a number of a thousand digits is read as infinite."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


HOUR = 3600.0  # seconds: the longer of the two lifetimes


def as_breakpoints(marked: Iterable[tuple[int, float]]) -> tuple[Breakpoint, ...]:
    """Make breakpoints of marks, (rows, seconds) each: in order, and one for each row. Marks without rows are left out."""
    longest: dict[int, float] = {}
    for rows, seconds in marked:
        if rows > 0:
            longest[rows] = max(seconds, longest.get(rows, 0.0))
    return tuple(Breakpoint(rows, longest[rows]) for rows in sorted(longest))


def moved(breakpoints: Iterable[Breakpoint], cut: Truncation | None, head: int) -> tuple[Breakpoint, ...]:
    """Move breakpoints of a prompt that was truncated behind its first `head` rows to where their tokens are now. Those within what
    was left out are left out, as is every one behind the head where more than one part may have been left out."""
    if cut is None:
        return tuple(breakpoints)
    found = []
    for each in breakpoints:
        if each.rows <= head:
            found.append((each.rows, each.ttl_s))
        elif cut.policy == "oldest" and each.rows >= head + cut.dropped:
            found.append((each.rows - cut.dropped, each.ttl_s))
    return as_breakpoints(found)


def input_usage(prompt: int, cached: int, breakpoints: Sequence[Breakpoint]) -> dict[str, Any]:
    """Split the `prompt` tokens: found in the cache, computed up to the last breakpoint, and the rest. A token up to several
    breakpoints is kept for the longest of their lifetimes."""
    last = max((each.rows for each in breakpoints), default=0)
    hours = max((each.rows for each in breakpoints if each.ttl_s >= HOUR), default=0)
    created = max(0, last - cached)
    for_an_hour = max(0, hours - cached)
    return {
        "input_tokens": prompt - cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created - for_an_hour,
            "ephemeral_1h_input_tokens": for_an_hour,
        },
    }


async def create_message(http: HttpRequest) -> Response:
    """Answer a conversation."""
    state, _ = state_and_record(http)
    body = await read_body(http, MessagesBody)
    state.models.check(body.model)
    cut = state.config.chat_truncation == "auto"
    marks = [mark for mark, _ in body.marks]
    prompt = await encode(http, body, body.messages, size=body.size, cut=cut, marks=marks)
    if not cut and len(prompt.ids) >= state.engine.max_model_len:
        raise RequestError(
            f"prompt is too long: {len(prompt.ids)} tokens > {state.engine.max_model_len - 1} maximum",
            param="messages",
            code="context_length_exceeded",
        )
    breakpoints = as_breakpoints(zip(prompt.marks, (seconds for _, seconds in body.marks), strict=True))
    requests = chat_requests(http, body, prompt, cut=cut, breakpoints=breakpoints)
    return await MessageReply(http, body, requests, prompt).answer()


async def count_tokens(http: HttpRequest) -> Response:
    """Count the tokens of a conversation, as a request for a reply would have them."""
    state, _ = state_and_record(http)
    body = await read_body(http, CountTokensBody)
    state.models.check(body.model)
    prompt = await encode(http, body, body.messages, size=body.size, cut=False, limited=False)
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
    prefix = "msg_"
    ping: ClassVar[bytes] = PING

    def __init__(self, http: HttpRequest, body: MessagesBody, requests: Sequence[Request], chat: ChatPrompt) -> None:
        super().__init__(http, body, requests, chat)
        self._content = MessageContent(thoughts_hidden=body.thoughts_hidden)

    async def whole(self) -> Response:
        async with aclosing(self.pieces()) as pieces:
            async for _, piece in pieces:
                deque(self._content.add(piece.parts), maxlen=0)
        deque(self._content.finish(), maxlen=0)
        self.remember()
        return await self.state.text_threads.respond(len(self.texts[0].text), self._describe)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        begun = pinged = False
        async with aclosing(self.pieces()) as pieces:
            async for _, piece in pieces:
                sent = b""
                if not begun:
                    # With the first token, not before: only then it is known what was cached.
                    message = self._describe() | {"stop_reason": None, "stop_sequence": None}
                    sent, begun = _event("message_start", {"message": message}), True
                events = list(self._content.add(piece.parts))
                if piece.finish_reason is not None:
                    events += self._content.finish()
                    self.remember()
                sent += _events(events[:1])
                if events and not pinged:
                    sent, pinged = sent + PING, True
                sent += _events(events[1:])
                if sent:
                    yield sent
        yield _events([("message_delta", self._ending()), ("message_stop", {})])

    def failed(self, error: RequestError) -> bytes:
        return _event("error", anthropic_error(error, self.record.request_id))

    # ---------------------------------------------------------------------------------------------- inside

    def _describe(self) -> dict[str, Any]:
        return {
            "id": self.id,
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
