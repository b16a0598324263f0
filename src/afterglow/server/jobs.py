"""The bridge between the engine's thread and the event loop.

The engine calls a sink from its own thread and must not wait there. All outputs of a step go over in one
wake-up of the loop, to the queues of the HTTP requests that wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from afterglow.config import EngineConfig
from afterglow.errors import RequestError
from afterglow.request import Output, PrefixInfo, Request, SessionInfo
from afterglow.server.assemble import Assembler, Piece
from afterglow.server.errors import engine_dead, shutting_down
from afterglow.server.record import TraceRecorder
from afterglow.store.conversations import Conversations

WATCH_SECONDS = 0.5


class EngineLike(Protocol):
    """What the server needs of an engine."""

    model_name: str
    config: EngineConfig
    max_model_len: int
    vocab_size: int

    @property
    def healthy(self) -> bool: ...
    @property
    def conversations(self) -> Conversations: ...
    def submit(self, request: Request, sink: Any) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def stats(self) -> Any: ...
    def reset_cache(self, salt: str | None = None, *, tenant: str | None = None) -> None: ...

    # These wait for the engine's thread: not for the event loop.
    def sessions(self, salt: str) -> list[SessionInfo]: ...
    def forget_session(self, salt: str, name: str) -> bool: ...
    def pin_session(self, salt: str, name: str, pinned: bool) -> bool: ...
    def register_prefix(
        self, name: str, tokens: Sequence[int], *, salt: str | None = "", about: str = ""
    ) -> PrefixInfo: ...
    def forget_prefix(self, name: str, *, salt: str | None = "") -> bool: ...
    def prefixes(self, salt: str | None = "") -> list[PrefixInfo]: ...
    def all_prefixes(self) -> dict[str, list[PrefixInfo]]: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """One reply asked for: the engine's request and where its text is put together."""

    request: Request
    assembler: Assembler


class Jobs:
    """All replies in flight. Lives on the event loop; only `_sink` runs elsewhere."""

    def __init__(self, engine: EngineLike, recorder: TraceRecorder | None = None) -> None:
        self.engine = engine
        self.recorder = recorder
        self.draining = False
        self._loop = asyncio.get_running_loop()
        self._groups: dict[str, tuple[Group, int]] = {}  # by request id
        self._arrived: deque[Output] = deque()
        self._scheduled = False
        self._watcher = self._loop.create_task(self._watch())

    def start(self, choices: Sequence[Choice]) -> Group:
        """Submit all choices of one HTTP request, or none. Errors: RequestError."""
        if self.draining:
            raise shutting_down()
        if not self.engine.healthy:
            raise engine_dead()
        group = Group(self, choices)
        try:
            for index, choice in enumerate(choices):
                self._groups[choice.request.id] = (group, index)
                self.engine.submit(choice.request, self._sink)
                group.open.add(index)
                if self.recorder is not None:
                    self.recorder.began(choice.request)
        except BaseException:
            self._groups.pop(choice.request.id, None)
            group.close()
            raise
        return group

    def drain(self) -> None:
        """Refuse what is new from now on."""
        self.draining = True

    def abort(self, error: RequestError) -> None:
        """End everything in flight with an error."""
        for group, _ in list(self._groups.values()):
            group.fail(error)

    async def aclose(self) -> None:
        self._watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watcher

    def forget(self, request_id: str) -> None:
        self._groups.pop(request_id, None)

    def _sink(self, output: Output) -> None:
        self._arrived.append(output)
        if not self._scheduled:
            # A lost race only wakes the loop twice; an output is never left behind, since it was appended
            # before the flag was read and `_deliver` clears the flag before it looks.
            self._scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        while self._arrived:
            output = self._arrived.popleft()
            if entry := self._groups.get(output.request_id):
                group, index = entry
                group.queue.put_nowait((index, output))

    async def _watch(self) -> None:
        """A dead engine answers nobody: tell those who wait."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._groups and not self.engine.healthy and not self.draining:
                self._deliver()
                self.abort(engine_dead())


@dataclass(slots=True)
class Group:
    """The choices of one HTTP request: their outputs arrive in one queue."""

    jobs: Jobs
    choices: Sequence[Choice]
    queue: asyncio.Queue[tuple[int, Output | RequestError]] = field(default_factory=asyncio.Queue)
    open: set[int] = field(default_factory=set)

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """(index of the choice, what is new), until all are finished. Errors: RequestError.

        Close the group afterwards, whatever happens.
        """
        while self.open:
            index, output = await self.queue.get()
            if isinstance(output, RequestError):
                raise output
            if index not in self.open:
                continue  # it went on for a step after its stop string
            piece = self.choices[index].assembler.feed(output)
            if piece.finish is not None or output.finish_reason is not None:
                self._leave(index, running=output.finish_reason is None)
            yield index, piece

    def fail(self, error: RequestError) -> None:
        self.queue.put_nowait((0, error))

    def close(self) -> None:
        """Cancel what still runs. Idempotent."""
        for index in sorted(self.open):
            self._leave(index, running=True)

    def _leave(self, index: int, running: bool) -> None:
        choice = self.choices[index]
        request_id = choice.request.id
        self.open.discard(index)
        self.jobs.forget(request_id)
        if self.jobs.recorder is not None:
            self.jobs.recorder.ended(choice.request, choice.assembler.tokens)
        if running:
            self.jobs.engine.cancel(request_id)
