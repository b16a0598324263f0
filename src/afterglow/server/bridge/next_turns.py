"""What the next turn of a conversation will begin with, told to the engine when a reply has ended."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from afterglow.errors import RequestError
from afterglow.library.assemble import Assembler
from afterglow.library.expected_turn import expected_turn
from afterglow.request import Request
from afterglow.server.engine_like import EngineLike
from afterglow.text import ChatPrompt, Tokenizer

log = logging.getLogger("afterglow.server")
MAX_WAITING = 64  # replies whose next turns are being rendered; further ones are not


class NextTurns:
    """Renders the next turns of conversations beside the event loop, one at a time. Lives on the event loop."""

    def __init__(self, engine: EngineLike, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, "afterglow-next-turns")  # which begins with the first reply
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Check whether next turns are being rendered."""
        return bool(self._tasks)

    def expect(self, prompt: ChatPrompt, request: Request, reply: Assembler) -> None:
        """Have the engine compute what the next turn will begin with, as far as that differs from the prompt and the reply."""
        if len(self._tasks) < MAX_WAITING and request.reuse and self._engine.config.cache.reuse:
            task = asyncio.get_running_loop().create_task(self._expect(prompt, request, reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _expect(self, prompt: ChatPrompt, request: Request, reply: Assembler) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._thread, expected_turn, self._tokenizer, prompt, request, reply)
            if found:
                self._engine.expect(found, request.id)
        except RequestError as error:  # the engine has stopped
            log.debug("a next turn is not computed ahead: %s", error)
        except Exception:
            log.exception("a next turn could not be rendered")

    def forget(self) -> None:
        """Forget the turns that are being rendered: conversations are deleted."""
        for task in self._tasks:
            task.cancel()

    def close(self) -> None:
        """Drop the work that waits, and let the thread end."""
        self.forget()
        self._thread.shutdown(wait=False, cancel_futures=True)
