"""`/v1/responses`: conversations whose state the server keeps, so that a client sends only what is new."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError, StoreError
from afterglow.request import SamplingParams
from afterglow.server.apart import FILES, FILES_SECONDS
from afterglow.server.bodies import read_body
from afterglow.server.items import (
    Item,
    as_messages,
    kept,
    new_id,
    output_message,
    output_text,
)
from afterglow.server.limits import MESSAGE_CHARS, check_messages
from afterglow.server.run import Run
from afterglow.server.schema import ResponseBody
from afterglow.server.state import Record, State, Wish
from afterglow.server.stored import stored
from afterglow.server.stream import EventStream, event, while_connected
from afterglow.server.wire import to_json
from afterglow.text import ChatPrompt, Reply

log = logging.getLogger("afterglow.server")
_OWN_USAGE = (
    "cached_tokens_details",
    "missed_tokens_details",
    "replies_details",
    "truncation",
    "kv_selection",
)  # not OpenAI's


async def create_response(http: HttpRequest) -> Response:
    state: State = http.app.state.afterglow
    record: Record = http.scope["afterglow.record"]
    body = await read_body(http, ResponseBody)
    model = state.check_model(body.model)
    items: list[Item] = body.input
    before = await _before(state, record, body.previous_response_id)

    def join() -> tuple[list[dict[str, str]], dict[int, Reply], int]:
        messages, replies = as_messages(body.instructions, [*before, *items])
        return messages, replies, check_messages(messages, "input")

    messages, replies, size = await state.tokenise(MESSAGE_CHARS * (len(before) + len(items)), join)
    salt = state.tenants.salt(record.caller, body.cache_salt)
    cut = body.truncation == "auto"
    wish = Wish(body.max_output_tokens, "input", "max_output_tokens")
    prompt = await state.encode_chat(
        messages, salt, body.chat_template_kwargs, wish, size=size, cut=cut, replies=replies
    )
    sampling = body.sampling(state.defaults, state.room_for(prompt.ids, wish, cut), None)
    choices = state.choices(http, body, [(prompt.ids, sampling)], salt, cut=cut, turns=prompt.turns)
    run = Run(state, record, choices, chat=prompt)
    turn = _Turn(state, record.caller.tenant, body, model, items, prompt, sampling, run)
    if body.stream:
        return EventStream(turn.stream(), run.close)
    try:
        return Response(to_json(await while_connected(turn.whole(), http)), media_type="application/json")
    finally:
        run.close()


async def _before(state: State, record: Record, previous: str | None) -> list[Item]:
    """What was said so far. Errors: RequestError."""
    if previous is None:
        return []
    found = await stored(state.engine.conversations.chain, previous, record.caller.tenant)
    if found is None:
        raise RequestError(
            f"Previous response with id {previous[:80]!r} not found, or one before it: it was not stored, was deleted, "
            "or has expired",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return list(found)


class _Turn:
    """One response in the making."""

    def __init__(
        self,
        state: State,
        tenant: str,
        body: ResponseBody,
        model: str,
        items: list[Item],
        prompt: ChatPrompt,
        sampling: SamplingParams,
        run: Run,
    ) -> None:
        self._state = state
        self._tenant = tenant
        self._body = body
        self._model = model
        self._items = items
        self._prompt = prompt
        self._sampling = sampling
        self._run = run
        self._id = new_id("resp")
        self._message = new_id("msg")
        self._created = int(time.time())
        self._store = body.store is not False
        self._sequence = 0

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._run.pieces()) as pieces:
            async for _ in pieces:
                pass
        return await self._finish()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        place = {"item_id": self._message, "output_index": 0, "content_index": 0}
        started = self._describe("in_progress", [], None)
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)
        item = output_message(self._message, "in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **place, part=output_text(""))
        try:
            async with aclosing(self._run.pieces()) as pieces:
                async for _, piece in pieces:
                    if piece.text:
                        yield self._event("response.output_text.delta", **place, delta=piece.text, logprobs=[])
            done = await self._finish()
        except RequestError as error:
            yield self._failed(str(error))
            return
        except Exception:
            log.exception("a stream failed")
            yield self._failed("internal error")
            return
        item = done["output"][0]
        yield self._event("response.output_text.done", **place, text=item["content"][0]["text"], logprobs=[])
        yield self._event("response.content_part.done", **place, part=item["content"][0])
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{done['status']}", response=done)

    async def _finish(self) -> dict[str, Any]:
        """The response as it ended, stored if that was asked for and can be done."""
        reply = self._run.choices[0].assembler
        status = "incomplete" if reply.finish == "length" else "completed"
        item = output_message(self._message, status, [reply.text])
        ends = self._state.reply_ends(self._run.choices[0].request)
        generated = self._state.tokenizer.remember(self._prompt, reply.text, reply.tokens, ends)
        done = self._describe(status, [item], self._usage())
        if self._store:
            items = [*self._items, kept(item, generated)]
            try:
                await FILES(
                    self._state.engine.conversations.add,
                    self._id,
                    self._tenant,
                    self._body.previous_response_id,
                    self._model,
                    done,
                    items,
                    within=FILES_SECONDS,
                )
            except (
                StoreError,
                RequestError,
            ) as error:  # the reply is there all the same, and says that it was not stored
                log.warning("a response was not stored: %s", error)
                done["store"] = False
        if self._body.return_token_ids:
            done |= {"prompt_token_ids": self._prompt.ids, "token_ids": reply.tokens}
        return done

    def _failed(self, message: str) -> bytes:
        error = {"code": "server_error", "message": message}
        return self._event("response.failed", response=self._describe("failed", [], None, error))

    def _event(self, kind: str, **fields: object) -> bytes:
        data = event({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return f"event: {kind}\n".encode() + data

    def _usage(self) -> dict[str, Any]:
        usage = self._run.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            **{name: usage[name] for name in _OWN_USAGE if name in usage},
        }

    def _describe(
        self, status: str, output: list[Item], usage: dict[str, Any] | None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_retention": body.prompt_cache_retention,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": self._store,
            "temperature": self._sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": self._sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": usage,
            "user": body.user,
        }
