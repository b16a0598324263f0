"""The thread that turns changes into messages, publishes them, and repeats those that a subscriber has missed (ZeroMQ).

A message has three frames: an empty topic, its number (8 bytes, big-endian), and the batch. Numbers without a message say
that changes were left out; the whole index follows then. A replay is asked for with an empty frame and the first number
wanted; it ends with the number -1.

Messages have the format that vLLM publishes: a batch is a msgpack array, each event in it a map.

[seconds since 1970, [event, ...], 0]                                  0: the data-parallel rank
{"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., "token_ids": [...], "block_size": 64,
 "lora_id": None, "medium": "GPU" | "CPU" | "STORAGE", "lora_name": None, "extra_keys": [...]}
{"type": "BlockRemoved", "block_hashes": [...], "medium": ...}
{"type": "AllBlocksCleared"}
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from afterglow.config import BLOCK_ROWS, EngineConfig
from afterglow.engine.kv_events.blocks import Blocks, ChangedExtents, Changes, KVEvent, RemovedBlocks, StoredBlocks
from afterglow.engine.stats import KVEventCounters
from afterglow.errors import ConfigError
from afterglow.plan.cache import Cache

END = (-1).to_bytes(8, "big", signed=True)  # in the place of a number: the end of a replay


def number_frame(number: int) -> bytes:
    """Write the number of a message as its frame."""
    return number.to_bytes(8, "big")


def encode(events: Sequence[KVEvent], at: float, token_ids: bool) -> bytes:
    """Write a batch. `at`: seconds since 1970. `token_ids`: with the tokens of the blocks; the list is empty without."""
    import msgpack

    packed: bytes = msgpack.packb([at, [_event(event, token_ids) for event in events], 0])
    return packed


def _event(event: KVEvent, token_ids: bool) -> dict[str, Any]:
    if isinstance(event, StoredBlocks):
        written: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": array("I", event.tokens).tolist() if token_ids else [],
            "block_size": BLOCK_ROWS,
            "lora_id": None,
            "medium": event.medium,
            "lora_name": None,
        }
        if event.salt:
            keys = [{"type": "cache_salt", "salt": event.salt}]
            written["extra_keys"] = [keys] + [None] * (len(event.hashes) - 1)
        return written
    if isinstance(event, RemovedBlocks):
        return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": event.medium}
    return {"type": "AllBlocksCleared"}


log = logging.getLogger("afterglow.engine")

MAX_WAITING = 10_000  # changes of steps that the thread has not come to
MAX_KEPT = 10_000  # messages for replays
MAX_KEPT_BYTES = 64 * 1024**2
EVENTS = 256  # in one message
AGAIN_SECONDS = 2.0  # after which the whole index is tried again where changes could not be sent
LAST_SECONDS = 1.0  # for what waits when it is closed


def check_installed() -> None:
    """Find the libraries. Raises: ConfigError."""
    for name in ("zmq", "msgpack"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--kv-events needs the module {name}: pip install 'afterglow-llm[cluster]'")


class KVEvents:
    """Publishes what happens in the plan's tiers. `publish` belongs to the engine's thread."""

    def __init__(self, cache: Cache, config: EngineConfig, seed: str, wake: Callable[[], None]) -> None:
        """`seed`: names the model. `wake` has the engine's thread call `publish`. Raises: ConfigError, where an address cannot be
        taken."""
        assert config.kv_events is not None
        self._changed = ChangedExtents(cache)
        self._publisher = Publisher(config.kv_events, config.kv_events_replay, config.kv_events_tokens, seed, wake)
        self._publisher.start()

    @property
    def counters(self) -> KVEventCounters:
        return self._publisher.counters

    @property
    def address(self) -> str:
        """Return where subscribers connect; where a port was left open, with the one that was found."""
        return self._publisher.address

    def publish(self) -> None:
        """Hand over what has changed since the last call. Never waits."""
        if self._publisher.behind:
            if self._publisher.has_room and time.monotonic() >= self._publisher.again_at:
                self._publisher.behind = False
                self._publisher.offer(self._changed.everything())
        elif (changes := self._changed.take()) is not None:
            self._publisher.offer(changes)

    def close(self) -> None:
        """Send what waits, and close the sockets."""
        self._publisher.close()


class Publisher:
    """The sockets and their thread."""

    def __init__(self, endpoint: str, replay: str | None, token_ids: bool, seed: str, wake: Callable[[], None]) -> None:
        """`wake` is called when there is room again for the whole index."""
        import zmq

        self.counters = KVEventCounters()
        self.behind = True  # do subscribers need the whole index?
        self.again_at = 0.0  # when it may be tried
        # Were a step's changes lost? Those of later ones say nothing, until the whole index comes.
        self._lost = False
        self._wake_engine = wake
        self._blocks = Blocks(seed)
        self._token_ids = token_ids
        self._waiting: deque[Changes] = deque()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._number = 0  # of the next message
        self._gaps = 0  # drops that the numbers show already
        self._closing = False
        self._context = zmq.Context()
        self._sockets: list[Any] = []
        try:
            self._events = self._bind(zmq.PUB, "--kv-events", endpoint)
            self._replays = self._bind(zmq.ROUTER, "--kv-events-replay", replay) if replay is not None else None
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.address: str = self._events.getsockopt_string(zmq.LAST_ENDPOINT)
        # For what the engine's thread and this one both change: the drops' count, and the pipe.
        self._lock = threading.Lock()
        self._ended = False
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._run, name="afterglow-kv-events", daemon=True)

    def _bind(self, kind: int, option: str, endpoint: str) -> Any:
        import zmq

        socket = self._context.socket(kind)
        socket.set_hwm(MAX_KEPT + 1)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{option} {endpoint} cannot be bound: {error}; choose another address") from None
        self._sockets.append(socket)
        return socket

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """May more changes wait?"""
        return len(self._waiting) < MAX_WAITING

    def offer(self, changes: Changes) -> None:
        """Let changes wait for the thread, or leave them out where too many wait."""
        if self.has_room:
            self._waiting.append(changes)
        else:
            self._drop()
        self._wake_up()

    def close(self) -> None:
        """Send what waits, for a second at most, and end the thread."""
        self._closing = True
        self._wake_up()
        self._thread.join(2 * LAST_SECONDS)
        if not self._thread.is_alive():
            self._context.destroy(linger=int(1000 * LAST_SECONDS))
            with self._lock:
                self._ended = True
                os.close(self._woken)
                os.close(self._wake)

    def _drop(self) -> None:
        """Note that a step's changes are left out."""
        self.behind = True
        with self._lock:
            self.counters.dropped += 1

    def _wake_up(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # it has been woken often enough
            # An engine that could not be stopped in time goes on, and the pipe's number may be another file's by then.
            if not self._ended:
                os.write(self._wake, b"\0")

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(int(1000 * AGAIN_SECONDS) if self._lost else None))
            if self._woken in ready:
                os.read(self._woken, 4096)
            if self._replays is not None and self._replays in ready:
                try:
                    self._replay(self._replays)
                except Exception:
                    log.exception("KV events could not be repeated")
            end = time.monotonic() + LAST_SECONDS
            while self._waiting and not (self._closing and time.monotonic() > end):
                self._take(self._waiting.popleft())
            if self._closing:
                return
            if self.behind and time.monotonic() >= self.again_at:
                self._wake_engine()

    def _take(self, changes: Changes) -> None:
        if self._lost and not changes.anew:
            return
        try:
            self._publish(self._blocks.apply(changes))
            self._lost = False
        except Exception:
            log.exception("KV events could not be published")
            self._lost = True
            self.again_at = time.monotonic() + AGAIN_SECONDS
            self._drop()

    def _publish(self, events: list[KVEvent]) -> None:
        for at in range(0, len(events), EVENTS):
            payload = encode(events[at : at + EVENTS], time.time(), self._token_ids)
            dropped = self.counters.dropped
            self._number += dropped - self._gaps
            self._gaps = dropped
            self._events.send_multipart((b"", number_frame(self._number), payload))
            self._kept.append((self._number, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])
            self._number += 1
            self.counters.messages += 1

    def _replay(self, socket: Any) -> None:
        request = socket.recv_multipart()
        if len(request) != 3 or len(request[2]) != 8:
            return  # from something that is no subscriber
        client, _, wanted = request
        first = int.from_bytes(wanted, "big")
        for number, payload in self._kept:
            if number >= first:
                socket.send_multipart((client, b"", b"", number_frame(number), payload))
        socket.send_multipart((client, b"", b"", END, b""))
