"""The engine as the server sees it, and the bridge between its thread and the event loop.

The engine calls a sink on its own thread and must not wait there. All outputs of a step cross in one wake-up of the
loop, and are handed to the HTTP requests that wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from afterglow.config import EngineConfig
from afterglow.errors import RequestError, engine_dead, shutting_down
from afterglow.listings import PrefixInfo, SessionInfo
from afterglow.request import Grammar, Output, Request
from afterglow.server.metrics.trace_recorder import TraceRecorder
from afterglow.store.database.conversations import Conversations

if TYPE_CHECKING:
    from afterglow.engine.shared_ids import SharedIds


class GrammarsLike(Protocol):
    """What compiles grammars (see `Grammars`)."""

    def check(self, grammar: Grammar | None) -> None: ...
    def use_tokenizer(self, read: Callable[[], str]) -> None: ...


class EngineLike(Protocol):
    """An engine, one of another process, or the stand-in on a server that only embeds."""

    model_name: str
    config: EngineConfig
    max_model_len: int
    vocab_size: int
    shared_ids: SharedIds | None

    @property
    def grammars(self) -> GrammarsLike: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def conversations(self) -> Conversations: ...
    def submit(self, request: Request, sink: Any) -> Future[None] | None: ...  # a future: it may yet be refused
    def expect(self, prompts: Sequence[Request], after: str | None = None) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def stats(self) -> Any: ...
    def reset_cache(self, salt: str | None = None, *, tenant: str | None = None) -> None: ...

    # These wait for the engine's thread: never call them on the event loop.
    def sessions(self, salt: str) -> list[SessionInfo]: ...
    def forget_session(self, salt: str, name: str) -> bool: ...
    def pin_session(self, salt: str, name: str, pinned: bool) -> bool: ...
    def register_prefix(
        self, name: str, tokens: Sequence[int], *, salt: str | None = "", about: str = ""
    ) -> PrefixInfo: ...
    def forget_prefix(self, name: str, *, salt: str | None = "") -> bool: ...
    def prefixes(self, salt: str | None = "") -> list[PrefixInfo]: ...
    def all_prefixes(self) -> dict[str, list[PrefixInfo]]: ...


WATCH_SECONDS = 0.5
Deliver = Callable[[Output | RequestError], None]  # called on the event loop


class Bridge:
    """All requests in flight. Lives on the event loop; only `_sink` runs on a thread of the engine."""

    def __init__(self, engine: EngineLike) -> None:
        self.engine = engine
        self.recorder: TraceRecorder | None = None
        self.draining = False  # new requests are refused
        self._delivers: dict[str, Deliver] = {}  # by request id
        self._arrived: deque[Output] = deque()
        self._scheduled = False

    def start(self, recorder: TraceRecorder | None = None) -> None:
        """Bind the bridge to the running event loop."""
        self.recorder = recorder
        self._loop = asyncio.get_running_loop()
        self._watcher = self._loop.create_task(self._watch())

    async def submit(self, requests: Sequence[tuple[Request, Deliver]]) -> None:
        """Submit requests, all or none; each `deliver` gets the outputs of its request, or an error, until `leave`. Raises: RequestError."""
        if self.draining:
            raise shutting_down()
        if not self.engine.healthy:
            raise engine_dead()
        begun: list[Request] = []
        try:
            asked = []
            for request, deliver in requests:
                self._delivers[request.id] = deliver
                begun.append(request)
                asked.append(self.engine.submit(request, self._sink))
            for accepted in asked:
                if accepted is not None:
                    await asyncio.wrap_future(accepted)
        except BaseException:
            for request in begun:
                self._delivers.pop(request.id, None)
                self.engine.cancel(request.id)
            raise
        if self.recorder is not None:
            for request in begun:
                self.recorder.began(request)

    def leave(self, request: Request, tokens: Sequence[int], *, running: bool) -> None:
        """End a request that got `tokens`. `running`: the engine still works on it, and is told to stop."""
        self._delivers.pop(request.id, None)
        if self.recorder is not None:
            self.recorder.ended(request, tokens)
        if running:
            self.engine.cancel(request.id)

    def abort(self, error: RequestError) -> None:
        """End all requests in flight with an error."""
        for deliver in list(self._delivers.values()):
            deliver(error)

    async def aclose(self) -> None:
        """Stop watching the engine."""
        self._watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watcher

    def _sink(self, output: Output) -> None:
        self._arrived.append(output)
        if not self._scheduled:
            # A lost race only wakes the loop twice; an output is never left behind, since it was appended
            # before the flag was read and `_deliver` clears the flag before it looks.
            self._scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: no request waits any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        while self._arrived:
            output = self._arrived.popleft()
            if deliver := self._delivers.get(output.request_id):
                deliver(output)

    async def _watch(self) -> None:
        """Tell the requests in flight when the engine has died: no output will come."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._delivers and not self.engine.healthy:
                self._deliver()
                self.abort(engine_dead())
