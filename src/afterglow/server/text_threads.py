"""Work on long texts beside the event loop: rendering, tokenising, writing large JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from starlette.responses import Response

from afterglow.server.json import write_json
from afterglow.text.lengths import LONG

T = TypeVar("T")
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
