"""The token ids of replies, for the requests that bring a reply back as text."""

from __future__ import annotations

import asyncio
import logging
import time
from math import inf

from afterglow.errors import RequestError, StoreError
from afterglow.library.assemble import Assembler
from afterglow.request import Request
from afterglow.server.blocking import FILES
from afterglow.server.bridge.next_turns import NextTurns
from afterglow.server.engine_like import EngineLike
from afterglow.text import ChatPrompt, Reply, Tokenizer

log = logging.getLogger("afterglow.server")
SWEEP_SECONDS = 60.0


class KeptReplies:
    """Remembers replies in memory, and over restarts where there is a disk tier."""

    def __init__(self, engine: EngineLike, tokenizer: Tokenizer, next_turns: NextTurns | None = None) -> None:
        """`next_turns`: where what the next turn has of a reply may differ from what was generated."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._next_turns = next_turns

    def remember(self, prompt: ChatPrompt, request: Request, reply: Assembler, *, write: bool) -> Reply | None:
        """Remember the ids of a finished reply in memory until its KV expires, and expect the next turn. `write`: over restarts
        as well.

        Returns None if no prefix of the ids decodes to the text, or the text cannot be told from its parts.
        """
        ttl = request.ttl_s if request.ttl_s is not None else self._engine.config.cache.ttl
        ends = time.time() + ttl if ttl is not None else inf
        kept = self._remember(prompt, reply, ends)
        if kept is not None and write and request.reuse and not request.volatile:
            self._write(prompt, kept, request, ends)
        if self._next_turns is not None:
            self._next_turns.expect(prompt, request, reply)
        return kept

    def _remember(self, prompt: ChatPrompt, reply: Assembler, ends: float) -> Reply | None:
        if reply.reasoned and not reply.reasoning:
            return None  # the message does not show that there were marks
        return self._tokenizer.remember(
            *(prompt, reply.text, reply.tokens, ends),
            content=reply.content,
            calls=reply.calls,
            reasoning=reply.reasoning,
        )

    def _write(self, prompt: ChatPrompt, reply: Reply, request: Request, ends: float) -> None:
        """Write the ids of a reply to the catalog, where there is one; in a thread, without waiting for it."""
        stored = self._engine.conversations
        before = [chain.hex() for chain in prompt.known]

        def work() -> None:
            body = {"text": reply.text, **reply.as_json()}
            try:
                stored.replies.keep(prompt.chain.hex(), prompt.salt, request.session_id, body, ends, before)
            except StoreError as error:
                log.warning("the ids of a reply are not kept: %s", error)

        if stored.folder is not None:
            try:
                FILES.start(work)
            except RequestError as error:
                log.warning("the ids of a reply are not kept: %s", error)

    def load(self) -> None:
        """Take over the replies that were kept before a restart."""
        try:
            for chain, salt, body, ends in self._engine.conversations.replies.all():
                self._tokenizer.replies.restore(bytes.fromhex(chain), salt, Reply.from_json(body["text"], body), ends)
        except StoreError as error:
            log.warning("the ids of earlier replies are lost: %s", error)

    async def sweep(self) -> None:
        """Forget expired replies and stored responses, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._tokenizer.replies.sweep(time.time())
            try:
                await FILES(self._engine.conversations.sweep)
            except (StoreError, RequestError) as error:
                log.warning("expired conversations are still stored: %s", error)
