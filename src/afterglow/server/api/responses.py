"""`/v1/responses`: the server stores conversations, so that a client sends only the new items. Stored responses can be read and
deleted, and their input items listed; a tenant finds only its own.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError, StoreError
from afterglow.request import Request
from afterglow.server.blocking import FILES, FILES_SECONDS
from afterglow.server.bodies.limits import MESSAGE_CHARS, check_messages
from afterglow.server.bodies.reader import read_body
from afterglow.server.bodies.reply_bodies import ResponseBody
from afterglow.server.bodies.response_items import (
    Item,
    ResponseOutput,
    as_messages,
    public,
    with_reply_ids,
)
from afterglow.server.json_responses import json_response, unavailable
from afterglow.server.replies.make_requests import chat_requests, encode
from afterglow.server.replies.pending_replies import Replies, event
from afterglow.server.state import State, state_and_record
from afterglow.server.tenants import RequestRecord
from afterglow.store.database.conversations import StoredResponse
from afterglow.text import ChatPrompt, Reply

log = logging.getLogger("afterglow.server")


async def create_response(http: HttpRequest) -> Response:
    """Answer, and keep the conversation."""
    state, record = state_and_record(http)
    body = await read_body(http, ResponseBody)
    state.models.check(body.model)
    items: list[Item] = body.input
    before = await _before(state, record, body.previous_response_id)

    def join() -> tuple[list[dict[str, Any]], dict[int, Reply], int]:
        messages, replies = as_messages(body.instructions, [*before, *items], len(before))
        return messages, replies, check_messages(messages, "input") + body.size

    messages, replies, size = await state.text_threads.run(MESSAGE_CHARS * (len(before) + len(items)), join)
    cut = body.truncation == "auto"
    prompt = await encode(http, body, messages, size=size, cut=cut, replies=replies)
    return await ResponseReply(http, body, chat_requests(http, body, prompt, cut=cut), prompt).answer()


async def _before(state: State, record: RequestRecord, previous: str | None) -> list[Item]:
    """Read the items of the conversation so far. Raises: RequestError."""
    if previous is None:
        return []
    found = await ask_database(state.engine.conversations.chain, previous, record.caller.tenant)
    if found is None:
        raise RequestError(
            f"Previous response with id {previous[:80]!r} not found, or one before it: it was not stored, was deleted, "
            "or has expired",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return list(found)


class ResponseReply(Replies):
    """One response under way."""

    body: ResponseBody
    chat: ChatPrompt
    prefix = "resp_"

    def __init__(self, http: HttpRequest, body: ResponseBody, requests: Sequence[Request], chat: ChatPrompt) -> None:
        super().__init__(http, body, requests, chat)
        self._output = ResponseOutput()
        self._store = body.store is not False
        self._sequence = 0

    async def whole(self) -> Response:
        async with aclosing(self.pieces()) as pieces:
            async for _, piece in pieces:
                deque(self._output.add(piece.parts), maxlen=0)
        deque(self._output.finish(self._status), maxlen=0)
        return json_response(await self._finish())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        started = self._describe("in_progress", [], None)
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)
        if not self.parted:  # otherwise the reply may be a call, or begin with reasoning
            for kind, fields in self._output.open_message():
                yield self._event(kind, **fields)
        async with aclosing(self.pieces()) as pieces:
            async for _, piece in pieces:
                for kind, fields in self._output.add(piece.parts):
                    yield self._event(kind, **fields)
        ended = list(self._output.finish(self._status))
        done = await self._finish()
        for kind, fields in ended:
            yield self._event(kind, **fields)
        yield self._event(f"response.{done['status']}", response=done)

    def failed(self, error: RequestError) -> bytes:
        said = {"code": error.code or "server_error", "message": str(error)}
        return self._event("response.failed", response=self._describe("failed", self._output.items, None, said))

    async def _finish(self) -> dict[str, Any]:
        """Describe the response as it ended; store it if the client wants that and the disk allows it."""
        reply = self.texts[0]
        status, output = self._status, self._output.items
        generated = self.remember(write=False)
        done = self._describe(status, output, self._response_usage())
        if self._store:
            items = [*self.body.input, *with_reply_ids(output, generated)]
            try:
                await FILES(
                    self.state.engine.conversations.add,
                    self.id,
                    self.record.caller.tenant,
                    self.body.previous_response_id,
                    self.model,
                    done,
                    items,
                    within=FILES_SECONDS,
                )
            except (
                StoreError,
                RequestError,
            ) as error:  # the response is sent all the same, and says that it was not stored
                log.warning("a response was not stored: %s", error)
                done["store"] = False
        if self.body.return_token_ids:
            done |= {"prompt_token_ids": self.chat.ids, "token_ids": reply.tokens}
        return done

    @property
    def _status(self) -> str:
        return "incomplete" if self.texts[0].finish == "length" else "completed"

    def _event(self, kind: str, **fields: object) -> bytes:
        data = event({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return f"event: {kind}\n".encode() + data

    def _response_usage(self) -> dict[str, Any]:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
            **self.own_usage(),
        }

    def _describe(
        self, status: str, output: list[Item], usage: dict[str, Any] | None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_retention": body.prompt_cache_retention,
            "reasoning": {"effort": body.reasoning_effort, "summary": None},
            "service_tier": "default",
            "store": self._store,
            "temperature": self.requests[0].sampling.temperature,
            "text": {"format": body.text_format},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": 0,
            "top_p": self.requests[0].sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": usage,
            "user": body.user,
        }


MAX_PAGE = 100


async def ask_database(work: Any, *args: Any, within: float = FILES_SECONDS) -> Any:
    """Call the database of conversations, outside of the event loop. Raises: RequestError, also after `within`
    seconds."""
    try:
        return await FILES(work, *args, within=within)
    except StoreError as error:
        log.warning("%s", error)
        raise unavailable("stored responses cannot be read just now") from None


async def get_response(http: HttpRequest) -> Response:
    """Read a stored response."""
    if http.query_params.get("stream") in ("true", "1"):
        raise RequestError("a stored response cannot be streamed; leave out stream", param="stream")
    found = await _find(http)
    return json_response(found.body)


async def delete_response(http: HttpRequest) -> Response:
    """Delete a stored response."""
    state, record = state_and_record(http)
    name = http.path_params["response"]
    if not await ask_database(state.engine.conversations.delete, name, record.caller.tenant):
        raise _not_found(name)
    return json_response({"id": name, "object": "response", "deleted": True})


async def input_items(http: HttpRequest) -> Response:
    """List the items that a response answered, earlier turns included; the newest first, as in OpenAI's API."""
    found = await _find(http)
    state, record = state_and_record(http)
    before = None
    if found.previous is not None:
        before = await ask_database(state.engine.conversations.chain, found.previous, record.caller.tenant)
    own = found.items[: len(found.items) - len(found.body["output"])]
    items = [public(item) for item in [*(before or []), *own]]
    query = http.query_params
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, got {order[:80]!r}", param="order")
    most = int(limit) if limit.isdecimal() and len(limit) <= 9 else 0  # Python reads no number of thousands of digits
    if not 1 <= most <= MAX_PAGE:
        raise RequestError(f"limit must be between 1 and {MAX_PAGE}, got {limit[:80]!r}", param="limit")
    if order == "desc":
        items.reverse()
    if after := query.get("after"):
        places = [number for number, item in enumerate(items) if item["id"] == after]
        if not places:
            raise RequestError(f"there is no item {after[:80]!r} in this response", param="after")
        items = items[places[0] + 1 :]
    page = items[:most]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(items),
        }
    )


async def _find(http: HttpRequest) -> StoredResponse:
    state, record = state_and_record(http)
    name = http.path_params["response"]
    found: StoredResponse | None = await ask_database(state.engine.conversations.get, name, record.caller.tenant)
    if found is None:
        raise _not_found(name)
    return found


def _not_found(name: str) -> RequestError:
    return RequestError(f"Response with id {name[:80]!r} not found.", status=404, code="not_found")
