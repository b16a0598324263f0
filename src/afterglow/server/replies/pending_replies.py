"""The replies to one HTTP request while they are under way: submission, outputs, text, accounts and end; server-sent events, and waiting for
a result while the client is connected.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from afterglow.errors import RequestError
from afterglow.request import CachedTokens, Output, Request
from afterglow.server.bodies.reply_bodies import Body
from afterglow.server.bridge import Deliver
from afterglow.server.json_responses import ClientGone, body_of, to_json
from afterglow.server.replies.make_requests import check_grammar
from afterglow.server.state import state_and_record
from afterglow.text import ChatPrompt, Reply
from afterglow.text.detokenizer import Assembler
from afterglow.text.lengths import LONG

log = logging.getLogger("afterglow.server")
T = TypeVar("T")

PING = b": ping\n\n"  # a comment: clients skip it, and proxies see that the connection is alive
PING_SECONDS = 5.0


def event(value: object) -> bytes:
    """Write a server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends the events of a generator. When the client disconnects, closes the generator and calls `close`. Sends `ping`, by
    default a comment, after each `PING_SECONDS` without an event.

    Starlette's own streaming leaves a generator that is cancelled between two chunks to the garbage collector. Here
    requests depend on it, which must end at once.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        ping: bytes = PING,
        failed: Callable[[RequestError], bytes] = lambda error: event(body_of(error)),
    ) -> None:
        """`failed` writes an error that comes too late for a status."""
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close  # a generator that was never begun runs no code when it is closed
        self._alive = ping
        self._failed = failed
        self._sending = False
        self._sent = 0.0  # by the loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(self._send_all(send), HttpRequest(scope, receive))
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._sent = asyncio.get_running_loop().time()
            pings = asyncio.create_task(self._ping(send))
            try:
                async for chunk in events:
                    await self._send_part(send, chunk)
            except RequestError as error:
                await self._send_part(send, self._failed(error))
            except Exception:
                log.exception("a stream failed")
                await self._send_part(send, self._failed(RequestError("internal error", status=500)))
            finally:
                pings.cancel()
                await asyncio.gather(pings, return_exceptions=True)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, send: Send, chunk: bytes) -> None:
        self._sending = True  # sending may take long: a client that reads slowly needs no comments
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sending = False
        self._sent = asyncio.get_running_loop().time()

    async def _ping(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = (clock() if self._sending else self._sent) + PING_SECONDS
            if clock() >= due:
                await send({"type": "http.response.body", "body": self._alive, "more_body": True})
                self._sent = clock()
            else:
                await asyncio.sleep(due - clock())


async def while_connected(work: Coroutine[Any, Any, T], request: HttpRequest) -> T:
    """Return the result of `work`, which is cancelled if the client disconnects first. Raises: ClientGone, and the
    errors of `work`."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Replies(ABC):
    """All replies to one HTTP request. Each endpoint adds how they are written.

    `texts[i]` is the reply to `requests[i]`; the replies to one prompt are neighbours.
    """

    ping: ClassVar[bytes] = PING  # for a stream without events
    prefix: ClassVar[str]  # of the answer's id

    def __init__(
        self, http: HttpRequest, body: Body, requests: Sequence[Request], chat: ChatPrompt | None = None
    ) -> None:
        """`chat`: the conversation that is answered, if it is one."""
        self.state, self.record = state_and_record(http)
        state = self.state
        self.id = self.prefix + uuid.uuid4().hex
        self.created = int(time.time())
        self.body = body
        self.requests = requests
        self.chat = chat
        self.model = body.model or state.models.names[0]
        parsers = [state.tool_parser(body.tool_use, chat) for _ in requests]
        splitters = [state.splitter(body.tool_use, chat) for _ in requests]
        self.parted = parsers[0] is not None or splitters[0] is not None  # replies may be more than content
        shown = state.tool_format.special and body.tool_use.parsed
        if chat is not None and state.reasoning is not None:
            shown = shown or state.reasoning.special
        self.texts = [
            Assembler(
                state.tokenizer,
                request.prompt,
                body.stops,
                include_stop=body.include_stop_str_in_output,
                skip_special_tokens=body.skip_special_tokens and not shown,
                min_tokens=request.sampling.min_tokens,
                parser=parser,
                splitter=splitter,
            )
            for request, parser, splitter in zip(requests, parsers, splitters, strict=True)
        ]
        self._http = http
        self._queue: asyncio.Queue[tuple[int, Output | RequestError]] = asyncio.Queue()
        self._open: set[int] = set()  # replies that the engine works on
        self._first: dict[int, float] = {}  # when a reply had its first token

    @abstractmethod
    async def whole(self) -> Response:
        """Wait for all replies and write them as one answer."""

    @abstractmethod
    def stream(self) -> AsyncGenerator[bytes, None]:
        """Write the replies as server-sent events while they arrive."""

    def failed(self, error: RequestError) -> bytes:
        """Write an error as the last event of a stream."""
        return event(body_of(error))

    def remember(self, *, write: bool = True) -> Reply | None:
        """Remember the first reply for when it comes back as text: a client that asks for several continues one at most. See
        `KeptReplies.remember`."""
        assert self.chat is not None
        kept = self.state.kept_replies
        return kept.remember(self.chat, self.requests[0], self.texts[0], began=self._began, write=write)

    async def answer(self) -> Response:
        """Submit the requests, and answer as the client wants it. Raises: RequestError, ClientGone."""
        if self.requests[0].sampling.grammar is not None:
            await self._compile()
        await self._submit()
        if self.body.stream:
            return EventStream(self.stream(), self.close, self.ping, self.failed)
        try:
            return await while_connected(self.whole(), self._http)
        finally:
            self.close()

    async def _compile(self) -> None:
        """Compile the grammars of the replies, which takes a while when one is new. Raises: RequestError."""
        grammars, use, asked = self.state.engine.grammars, self.body.tool_use, self.body.grammar
        for grammar in dict.fromkeys(request.sampling.grammar for request in self.requests):
            await self.state.text_threads.run(LONG + 1, functools.partial(check_grammar, grammars, grammar, use, asked))

    async def _submit(self) -> None:
        """Submit all requests, or none. Raises: RequestError."""
        self.record.prompt_tokens = self.prompt_tokens
        self._began = time.perf_counter()

        def deliver(index: int) -> Deliver:
            return lambda output: self._queue.put_nowait((index, output))

        await self.state.bridge.submit([(request, deliver(index)) for index, request in enumerate(self.requests)])
        self._open.update(range(len(self.requests)))

    async def pieces(self) -> AsyncGenerator[tuple[int, Output], None]:
        """Yield (number of the reply, its new part) until all are finished. Close the generator: that ends the
        requests, however the iteration ends. Raises: RequestError."""
        try:
            while self._open:
                index, output = await self._queue.get()
                if isinstance(output, RequestError):
                    raise output
                if index not in self._open:
                    continue  # the engine's step after a stop string
                if output.error is not None:
                    self.record.note = f"failed: {output.error}"  # a stream's status says nothing of it
                piece = self.texts[index].feed(output)
                if piece.finish_reason is not None or output.finish_reason is not None:
                    self._leave(index, running=output.finish_reason is None)
                self._account(index, piece)
                yield index, piece
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the replies that are not finished. Idempotent."""
        for index in sorted(self._open):
            self._leave(index, running=True)

    def _leave(self, index: int, running: bool) -> None:
        self._open.discard(index)
        self.state.bridge.leave(self.requests[index], self.texts[index].tokens, running=running)

    # -------------------------------------------------------------------------------------------- accounts

    def _account(self, index: int, piece: Output) -> None:
        record, now = self.record, time.perf_counter()
        if len(piece.tokens) == len(
            self.texts[index].tokens
        ):  # the first output says what was cached, and what was left out
            record.cached, record.prompt_tokens = self.cached, self.prompt_tokens
        if piece.tokens:
            if record.ttft is None:
                record.ttft = now - record.began
            elif len(self.requests) == 1:
                self.state.metrics.inter_token.observe((now - record.last_token) / len(piece.tokens))
            record.last_token = now
            record.generated += len(piece.tokens)
            self._first.setdefault(index, now)
        if piece.finish_reason is not None:
            self._finished(index, now)

    def _finished(self, index: int, now: float) -> None:
        """Count a reply that has ended, and was not cancelled."""
        reply, metrics = self.texts[index], self.state.metrics
        first = self._first.get(index, now)
        metrics.finished(
            prompt=self._prompt_of(index),
            generated=len(reply.tokens),
            queue=reply.waited,
            prefill=max(0.0, first - self._began - reply.waited),
            decode=now - first,
        )
        deleted = self.state.kept_replies.was_deleted(self.requests[index], self._began)
        if self.state.shared_names is not None and not deleted:
            self.state.shared_names.used(self.requests[index], self._prompt_of(index) + len(reply.tokens))
        if len(reply.tokens) > 1:
            self.record.per_token.append((now - first) / (len(reply.tokens) - 1))
        n = self.body.replies_per_prompt
        siblings = self.texts[index - index % n :][:n]
        if all(sibling.finish is not None for sibling in siblings):
            metrics.most_generated.observe(max(len(sibling.tokens) for sibling in siblings))

    @property
    def _firsts(self) -> range:
        """Return the numbers of the first replies to each prompt."""
        return range(0, len(self.requests), self.body.replies_per_prompt)

    @property
    def cached(self) -> CachedTokens:
        """Count cached tokens by tier. Further replies to a prompt find it cached by the first one: they do not count."""
        return sum((self.texts[index].cached for index in self._firsts), CachedTokens())

    @property
    def prompt_tokens(self) -> int:
        """Count the tokens of the prompts, without the tokens that truncation left out."""
        return sum(map(self._prompt_of, self._firsts))

    def _prompt_of(self, index: int) -> int:
        cut = self.texts[index].truncation
        return len(self.requests[index].prompt) - (cut.dropped if cut is not None else 0)

    # ----------------------------------------------------------------------------------------------- usage

    def usage(self) -> dict[str, Any]:
        """Describe the tokens of all replies, as OpenAI does, and Afterglow's own details."""
        prompt = self.prompt_tokens
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": self.record.generated,
            "total_tokens": prompt + self.record.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached.total},
        }
        if self.chat is not None:
            reasoning = sum(reply.reasoning_tokens for reply in self.texts)
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage | self.own_usage()

    def own_usage(self) -> dict[str, Any]:
        """Describe the tokens of all replies as no other server does."""
        config = self.state.engine.config
        details = {
            "cached_tokens_details": self.cached.by_tier(config.cache.shared is not None),
            "kv_dtype": config.kv_dtype if config.kv_dtype != "auto" else None,
            "missed_tokens_details": self._missed(),
            "replies_details": self._returned(),
            "truncation": self._truncation(),
            "kv_selection": self._selected(),
        }
        return {name: value for name, value in details.items() if value is not None}

    def _missed(self) -> dict[str, int]:
        """Count the prompt tokens that were computed, by reason: not in the cache, or `recomputed` because that was
        predicted to be faster. Together with the cached tokens they are the whole prompt."""
        found: dict[str, int] = {}
        for index in self._firsts:
            reply = self.texts[index]
            if not reply.tokens and reply.finish is None:  # nothing is known of its prompt yet
                continue
            rest = self._prompt_of(index) - reply.cached.total - reply.missed.tokens
            for reason, tokens in ((reply.missed.reason, reply.missed.tokens), ("recomputed", rest)):
                if tokens > 0:
                    found[reason] = found.get(reason, 0) + tokens
        return found

    def _truncation(self) -> dict[str, Any] | None:
        """Describe the truncation of the prompt, if there was one."""
        found = self.texts[0].truncation
        if found is None:
            return None
        said = {
            "dropped_tokens": found.dropped,
            "kept_tokens": found.kept,
            "reused": found.reused,
            "policy": found.policy,
        }
        uncut = self.chat.uncut if self.chat is not None else None
        return said if uncut is None else {**said, "note": f"not cut between turns: {uncut}"}

    def _returned(self) -> dict[str, int] | None:
        """Count the earlier replies in a conversation by how they became tokens, if there are any."""
        if self.chat is None or not self.chat.spliced + self.chat.retokenised:
            return None
        return {"spliced": self.chat.spliced, "retokenised": self.chat.retokenised}

    def _selected(self) -> dict[str, Any] | None:
        """Count the cached prompt tokens that the reply attended to, if not to all (an approximation)."""
        found = self.texts[0].selected
        if found is None:
            return None
        return {
            "tokens": found.rows,
            "kept_tokens": round(found.kept, 1),
            "layers": found.layers,
            "fallback_layers": found.fallbacks,
            "taken_tokens": round(found.taken, 1),
            "renewals": found.renewals,
        }
