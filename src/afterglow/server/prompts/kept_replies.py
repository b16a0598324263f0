"""What a reply leaves for the next turn: its token ids, for when it comes back as text, and the prompt that will follow it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from math import inf

from afterglow.errors import RequestError, StoreError
from afterglow.library.text_reply import expected_turn
from afterglow.request import Request
from afterglow.server.blocking import FILES
from afterglow.server.bridge import EngineLike
from afterglow.text import ChatPrompt, Reply, Tokenizer
from afterglow.text.detokenizer import Assembler

log = logging.getLogger("afterglow.server")
MAX_WAITING = 64  # replies whose next turns are being rendered; further ones are not
MAX_DELETED = 4096  # conversations whose running turns leave no reply


SWEEP_SECONDS = 60.0


class KeptReplies:
    """Remembers replies in memory, and over restarts where there is a disk tier. Renders the next turns of conversations beside the
    event loop, one at a time. Lives on the event loop."""

    def __init__(self, engine: EngineLike, tokenizer: Tokenizer, *, expects: bool) -> None:
        """`expects`: what the next turn has of a reply may differ from what was generated."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._expects = expects
        self._thread = ThreadPoolExecutor(1, "afterglow-next-turns")  # which begins with the first reply
        self._tasks: dict[asyncio.Task[None], Request] = {}
        self._deleted: OrderedDict[tuple[str, str], float] = OrderedDict()  # conversations, and when

    @property
    def busy(self) -> bool:
        """Check whether next turns are being rendered."""
        return bool(self._tasks)

    def remember(
        self, prompt: ChatPrompt, request: Request, reply: Assembler, *, began: float, write: bool
    ) -> Reply | None:
        """Remember the ids of a finished reply in memory until its KV expires, and expect the next turn. `began`: when the request came, by
        `time.perf_counter`. `write`: over restarts as well.

        Returns None if no prefix of the ids decodes to the text, if the text cannot be told from its parts, or if the conversation was
        deleted meanwhile.
        """
        if self.was_deleted(request, began):
            return None
        ttl = request.ttl_s if request.ttl_s is not None else self._engine.config.cache.ttl
        ends = time.time() + ttl if ttl is not None else inf
        kept = None
        if reply.reasoning or not reply.reasoned:  # otherwise the message does not show that there were marks
            parts = (reply.content, reply.calls, reply.reasoning)
            kept = self._tokenizer.remember(prompt, reply.text, reply.tokens, ends, *parts)
        if kept is not None and request.session_id is not None:
            self._tokenizer.replies.assign(prompt.chain, request.session_id)
        if kept is not None and write and request.reuse and not request.volatile:
            self._write(prompt, kept, request, ends)
        if self._expects:
            self._expect(prompt, request, reply)
        return kept

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
            replies = self._tokenizer.replies
            for name, salt, body, session, ends in self._engine.conversations.replies.all():
                chain = bytes.fromhex(name)
                replies.restore(chain, salt, Reply.from_json(body["text"], body), ends)
                if session is not None:
                    replies.assign(chain, session)
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

    # ------------------------------------------------------------------------------------------------ next turns

    def _expect(self, prompt: ChatPrompt, request: Request, reply: Assembler) -> None:
        """Have the engine compute what the next turn will begin with, as far as that differs from the prompt and the reply."""
        if len(self._tasks) < MAX_WAITING and request.reuse and self._engine.config.cache.reuse:
            task = asyncio.get_running_loop().create_task(self._render(prompt, request, reply))
            self._tasks[task] = request
            task.add_done_callback(lambda task: self._tasks.pop(task, None))

    async def _render(self, prompt: ChatPrompt, request: Request, reply: Assembler) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._thread, expected_turn, self._tokenizer, prompt, request, reply)
            if found:
                self._engine.expect(found, request.id)
        except RequestError as error:  # the engine has stopped
            log.debug("a next turn is not computed ahead: %s", error)
        except Exception:
            log.exception("a next turn could not be rendered")

    def forget_turns(self) -> None:
        """Forget the turns that are being rendered: conversations are deleted."""
        for task in self._tasks:
            task.cancel()

    def delete(self, salt: str, session: str) -> int:
        """Forget the replies of a named conversation, also of turns that still run; return the number of replies that were in memory."""
        self._deleted[salt, session] = time.perf_counter()
        self._deleted.move_to_end((salt, session))
        if len(self._deleted) > MAX_DELETED:
            self._deleted.popitem(last=False)
        for task, request in self._tasks.items():
            if (request.salt, request.session_id) == (salt, session):
                task.cancel()
        return self._tokenizer.replies.forget(lambda own: own == salt, session)

    def was_deleted(self, request: Request, began: float) -> bool:
        """Check whether a request's conversation was deleted since it `began`, by `time.perf_counter`."""
        name = request.session_id
        return name is not None and self._deleted.get((request.salt, name), 0.0) > began

    def close(self) -> None:
        """Drop the work that waits, and let the thread end."""
        self.forget_turns()
        self._thread.shutdown(wait=False, cancel_futures=True)
