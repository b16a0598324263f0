"""The replies to one HTTP request while they are under way: submission, outputs, text, accounts and end."""

from __future__ import annotations

import asyncio
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError
from afterglow.library.assemble import Assembler, Piece
from afterglow.request import CachedTokens, Output, Request
from afterglow.server.access.tenants import RequestRecord
from afterglow.server.bodies.reply_bodies import Body
from afterglow.server.bridge.bridge import Deliver
from afterglow.server.replies.make_requests import check_grammar
from afterglow.server.replies.stream import PING, EventStream, while_connected
from afterglow.server.state import State
from afterglow.text import ChatPrompt
from afterglow.text.lengths import LONG


class Replies(ABC):
    """All replies to one HTTP request. Each endpoint adds how they are written.

    `texts[i]` is the reply to `requests[i]`; the replies to one prompt are neighbours.
    """

    ping: ClassVar[bytes] = PING  # for a stream without events

    def __init__(
        self, state: State, http: HttpRequest, body: Body, requests: Sequence[Request], chat: ChatPrompt | None = None
    ) -> None:
        """`chat`: the conversation that is answered, if it is one."""
        self.state = state
        self.record: RequestRecord = http.scope["afterglow.record"]
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

    async def answer(self) -> Response:
        """Submit the requests, and answer as the client wants it. Raises: RequestError, ClientGone."""
        if self.requests[0].sampling.grammar is not None:
            await self._compile()
        self._submit()
        if self.body.stream:
            return EventStream(self.stream(), self.close, self.ping)
        try:
            return await while_connected(self.whole(), self._http)
        finally:
            self.close()

    async def _compile(self) -> None:
        """Compile the grammars of the replies, which takes a while when one is new. Raises: RequestError."""
        grammars, use, asked = self.state.engine.grammars, self.body.tool_use, self.body.grammar
        for grammar in dict.fromkeys(request.sampling.grammar for request in self.requests):
            await self.state.text_threads.run(LONG + 1, functools.partial(check_grammar, grammars, grammar, use, asked))

    def _submit(self) -> None:
        """Submit all requests, or none. Raises: RequestError."""
        self.record.prompt_tokens = self.prompt_tokens
        self._began = time.perf_counter()

        def deliver(index: int) -> Deliver:
            return lambda output: self._queue.put_nowait((index, output))

        try:
            for index, request in enumerate(self.requests):
                self.state.bridge.submit(request, deliver(index))
                self._open.add(index)
        except BaseException:
            self.close()
            raise

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yield (number of the reply, its new part) until all are finished. Close the generator: that ends the
        requests, however the iteration ends. Raises: RequestError."""
        try:
            while self._open:
                index, output = await self._queue.get()
                if isinstance(output, RequestError):
                    raise output
                if index not in self._open:
                    continue  # the engine's step after a stop string
                piece = self.texts[index].feed(output)
                if piece.finish is not None or output.finish_reason is not None:
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

    def _account(self, index: int, piece: Piece) -> None:
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
        if piece.finish is not None:
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
        if self.state.shared_names is not None:
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
        found = [self.texts[index].cached for index in self._firsts]
        return CachedTokens(*(sum(getattr(c, tier) for c in found) for tier in ("device", "host", "disk", "shared")))

    @property
    def prompt_tokens(self) -> int:
        """Count the tokens of the prompts, without the tokens that truncation left out."""
        return sum(map(self._prompt_of, self._firsts))

    @property
    def reasoning_tokens(self) -> int:
        """Count the generated tokens that are reasoning."""
        return sum(reply.reasoning_tokens for reply in self.texts)

    def _prompt_of(self, index: int) -> int:
        cut = self.texts[index].truncation
        return len(self.requests[index].prompt) - (cut.dropped if cut is not None else 0)

    # ----------------------------------------------------------------------------------------------- usage

    def usage(self) -> dict[str, Any]:
        """Describe the tokens of all replies, as OpenAI does, and Afterglow's own details."""
        prompt = self.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.record.generated,
            "total_tokens": prompt + self.record.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached.total},
            **(
                {"completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}}
                if self.chat is not None
                else {}
            ),
            **self.own_usage(),
        }

    def own_usage(self) -> dict[str, Any]:
        """Describe the tokens of all replies as no other server does."""
        cached = self.cached
        replies, truncation, selected = self._returned(), self._truncation(), self._selected()
        config = self.state.engine.config
        kv_dtype, shared = config.kv_dtype, {} if config.cache.shared is None else {"shared": cached.shared}
        return {
            "cached_tokens_details": {"device": cached.device, "host": cached.host, "disk": cached.disk, **shared},
            **({"kv_dtype": kv_dtype} if kv_dtype != "auto" else {}),
            "missed_tokens_details": self._missed(),
            **({"replies_details": replies} if replies is not None else {}),
            **({"truncation": truncation} if truncation is not None else {}),
            **({"kv_selection": selected} if selected is not None else {}),
        }

    def _missed(self) -> dict[str, int]:
        """Count the prompt tokens that were computed, by reason: not in the cache, or `recomputed` because that was
        predicted to be faster. Together with the cached tokens they are the whole prompt."""
        found: dict[str, int] = {}
        for index in self._firsts:
            reply = self.texts[index]
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
