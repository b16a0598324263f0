"""One end of the connection between a server and its engine's process, and the messages on it.

Both ends are processes of one program, and no third can connect: messages are pickled. All that waits is sent in one piece.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from afterglow.config import EngineConfig
from afterglow.engine.stats import EngineStats
from afterglow.memo.break_even import Gain

log = logging.getLogger("afterglow.server")

SECONDS_TO_SEND = 5.0  # what waits when a channel is closed


@dataclass(frozen=True, slots=True)
class Call:
    """Asks for a call: `path` names an object of the engine's process and its method. `number`: of the answer; None: there is none,
    and the call is made before the next message is read."""

    number: int | None
    path: str
    args: Sequence[Any]
    named: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answers a call: with what it returned, or with the error that it raised."""

    number: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Yielded:
    """Names what a call yields: `EngineHost.take` takes the next."""

    name: str


@dataclass(frozen=True, slots=True)
class Levels:
    """Tells what the engine has counted, and whether it runs. `damaged`: maps of each embedder's memo."""

    stats: EngineStats
    healthy: bool
    damaged: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class EmbedderFacts:
    """Describes a model that embeds. `memo_used`: None where it has no memo."""

    name: str
    template: str
    vocab: int
    dimensions: int
    max_tokens: int
    memo_used: bool | None
    memo_gain: Gain | None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Describes an engine that has been loaded. `folder`: of its cache on disk. `shares`: names, with other servers."""

    model_name: str
    config: EngineConfig
    max_model_len: int
    vocab_size: int
    folder: Path | None
    shares: bool
    embedders: Sequence[EmbedderFacts]
    levels: Levels


class Channel:
    """Sends messages in order, from any thread and without waiting, and receives."""

    def __init__(self, end: socket.socket, prepare: Callable[[list[Any]], list[Any]] | None = None) -> None:
        """Take over one end of a pair of sockets. `prepare` gets the messages that are sent together, on the thread that sends them, and
        returns what is sent."""
        self._socket = end
        self._connection: Connection[Any, Any] = Connection(os.dup(end.fileno()))
        self._prepare = prepare or (lambda messages: messages)
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="afterglow-channel", daemon=True)
        self._writer.start()

    def send(self, *messages: Any) -> None:
        """Send messages. What can no more be sent, because the other process has ended, is dropped."""
        for message in messages:
            self._waiting.put(message)

    def receive(self) -> list[Any]:
        """Wait for messages. Raises: EOFError, when the other process has ended, and when this end is closed."""
        try:
            found: list[Any] = pickle.loads(self._connection.recv_bytes())
        except OSError as error:  # a socket whose peer was killed may be reset
            raise EOFError(str(error)) from None
        return found

    def close(self) -> None:
        """Send what waits, and close this end."""
        self._waiting.put(_LAST)
        self._writer.join(SECONDS_TO_SEND)
        self.hang_up()
        self._socket.close()

    def hang_up(self) -> None:
        """End the connection at both ends."""
        with contextlib.suppress(OSError):  # the other process has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        last = False
        try:
            while not last:
                some = [self._waiting.get()]
                while not self._waiting.empty():
                    some.append(self._waiting.get())
                last = _LAST in some
                if messages := self._prepare([message for message in some if message is not _LAST]):
                    self._connection.send_bytes(pickle.dumps(messages, pickle.HIGHEST_PROTOCOL))
        except OSError:
            return
        except Exception:  # neither process may wait for messages that never come
            log.exception("messages between the server and its engine could not be sent")
            self.hang_up()


_LAST = object()
