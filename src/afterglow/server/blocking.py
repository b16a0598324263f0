"""Blocking calls, to the engine's thread or to a file system, each in a thread of its own.

The event loop's default threads are few and shared: a disk that hangs would hold them one after the other. These
threads are bounded in number, serve one target only, and do not keep a process from ending.

Work on long texts has threads as well: rendering, tokenising, writing large JSON.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

from starlette.responses import Response

from afterglow.server.json_responses import unavailable, write_json
from afterglow.text.lengths import LONG

T = TypeVar("T")
FILES_SECONDS: Final = 30.0  # how long a request waits for a file system


class BlockingCalls:
    """Runs calls to one target. `most`: calls at a time; more are refused."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self._running = 0
        self._lock = threading.Lock()

    async def __call__(self, work: Callable[..., T], *args: Any, within: float | None = None) -> T:
        """Run `work(*args)` in a thread and return its result.

        Raises: RequestError, if too many calls wait already, or after `within` seconds (the call then goes on); and the
        errors of `work`.
        """
        done = asyncio.wrap_future(self.start(work, *args))
        try:
            await asyncio.wait([done], timeout=within)
            if not done.done():
                raise unavailable(f"{self._what} did not answer for {within:g} s; try again later")
            return done.result()
        finally:
            done.cancel()

    def start(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Begin a call. Raises: RequestError, if too many calls wait already."""
        with self._lock:
            if self._running >= self._most:
                raise unavailable(f"{self._running} requests wait for {self._what} already; try again later")
            self._running += 1
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # who stops waiting does not end the call

        def run() -> None:
            try:
                result = work(*args)
            except BaseException as error:
                self._leave()
                future.set_exception(error)
            else:
                self._leave()
                future.set_result(result)

        threading.Thread(target=run, name="afterglow-apart", daemon=True).start()
        return future

    def _leave(self) -> None:
        with self._lock:
            self._running -= 1


ENGINE: Final = BlockingCalls("the engine", 128)
PROMPTS: Final = BlockingCalls("the registration of system prompts", 16)
FILES: Final = BlockingCalls("the file of stored responses", 64)


THREADS: Final = 2  # for long texts; further ones wait for their turn


class TextThreads:
    """Runs short work at once, and long work in a few threads of its own.

    The event loop's default threads are not used: short calls of other endpoints would wait for them.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "afterglow-text")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return `work()`. `size`: characters to tokenise, or ids to decode; from `LONG` on a thread does the work."""
        return work() if size <= LONG else await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def respond(self, size: int, make: Callable[[], object]) -> Response:
        """Send `make()` as JSON. `size`: about how many values, or ids, the answer has."""
        written = await self.run(size, lambda: write_json(make()))
        return Response(written, media_type="application/json")

    def close(self) -> None:
        """Drop the work that waits, and let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
