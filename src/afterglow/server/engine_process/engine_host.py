"""What the engine's process does: it loads the models, and serves the process that speaks HTTP until told to end, or until that has ended."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from numpy.typing import NDArray

from afterglow.errors import AfterglowError, UserError
from afterglow.memo.texts import TextEmbedder
from afterglow.request import Output, Request
from afterglow.server.bridge import EngineLike
from afterglow.server.engine_process import far
from afterglow.server.engine_process.channel import (
    Answer,
    Call,
    Channel,
    EmbedderFacts,
    EngineFacts,
    Levels,
    Yielded,
)
from afterglow.server.engine_process.outputs import NewTokens, OutputWriter
from afterglow.text import Tokenizer
from afterglow.thread_priority import give_way

log = logging.getLogger("afterglow.server")

LOOK_SECONDS = 0.5  # between two looks at the engine's levels
_LOOK = object()


class EngineHost:
    """Makes the calls of the server's process, and sends what comes of them."""

    def __init__(self, handle: int) -> None:
        """Connect by the socket of this number. `first` is the first message."""
        self._channel = Channel(socket.socket(fileno=handle), self._with_levels)
        self.first: Any = self._channel.receive()[0]
        self._engine: EngineLike | None = None
        self._embedders: Sequence[TextEmbedder] = ()
        self._levels: Levels | None = None
        self._numbers = itertools.count()
        self._ended = threading.Event()
        self._closed = False
        # The one thread on which passes of embeddings run.
        self._embedding = ThreadPoolExecutor(1, "afterglow-embed", initializer=give_way)
        threading.Thread(target=self._read, name="afterglow-calls", daemon=True).start()

    def serve(self, engine: EngineLike, tokenizer: Tokenizer, embedders: Sequence[TextEmbedder]) -> None:
        """Serve an engine that runs, until the server's process is done with it."""
        engine.grammars.use_tokenizer(tokenizer.serialized)
        self._embedders = embedders
        far.offer("engine", engine)
        far.offer("host", self)
        levels = self._look(engine)
        facts = EngineFacts(
            engine.model_name,
            engine.config,
            engine.max_model_len,
            engine.vocab_size,
            engine.conversations.folder,
            engine.shared_ids is not None,
            [_facts(each) for each in embedders],
            levels,
        )
        self._engine = engine  # before the first submission
        self._channel.send(facts)
        while not self._ended.wait(LOOK_SECONDS):
            self._channel.send(_LOOK)

    def refuse(self, error: UserError) -> None:
        """Tell why the models cannot be loaded, and end."""
        self._closed = True
        self._channel.send(error)

    def close(self) -> None:
        """Send what waits. The process can end."""
        self._closed = True
        self._channel.close()

    # ------------------------------------------------------------------------------------- calls of the other process

    def submit(self, request: Request) -> None:
        """Submit a request; its outputs are messages. Raises: RequestError."""
        assert self._engine is not None
        self._engine.submit(request, OutputWriter(self._channel.send))

    def embed(self, index: int, sequences: Sequence[Sequence[int]]) -> tuple[NDArray[Any], int, Sequence[bool]]:
        """Embed sequences of token ids -> vectors float32 [n, dimensions], tokens, hits of the memo. Raises: RequestError."""
        result = self._embedding.submit(self._embedders[index].embedder.embed, sequences).result()
        return result.vectors.numpy(), result.tokens, result.hits

    def take(self, name: str) -> tuple[Any, ...]:
        """Take the next of what a call yields, as a tuple of one; an empty tuple at the end."""
        found = next(far.here(name), _LOOK)
        return () if found is _LOOK else (found,)

    def drop(self, name: str) -> None:
        """Forget what a call yields."""
        far.withdraw(name)

    def end(self) -> None:
        """End `serve`."""
        self._ended.set()

    # ------------------------------------------------------------------------------------------------------- messages

    def _read(self) -> None:
        try:
            while True:
                for message in self._channel.receive():
                    self._make(message)
        except EOFError:
            if self._closed:
                return
            log.error("the server's process has ended, and so does its engine")
        except Exception:
            log.exception("messages of the server's process could not be read, and its engine ends")
        os._exit(1)  # as a killed server would: nothing more is written, what is on disk stays valid

    def _make(self, call: Call) -> None:
        """Make a call. One that is answered has a thread of its own, but for the submission of requests: a request that is cancelled
        next has to be known."""
        if call.number is None or call.path == "host.submit":
            self._answer(call)
        else:
            threading.Thread(target=self._answer, args=(call,), name="afterglow-call", daemon=True).start()

    def _answer(self, call: Call) -> None:
        value: Any = None
        failure: Exception | None = None
        try:
            value = far.here(call.path)(*call.args, **call.named)
        except AfterglowError as error:
            failure = error
        except Exception as error:
            log.exception("a call of %s failed in a way that was not foreseen", call.path)
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        if call.number is not None:
            if isinstance(value, Iterator):
                far.offer(name := f"yielded-{next(self._numbers)}", value)
                value = Yielded(name)
            self._channel.send(Answer(call.number, value, failure))

    def _with_levels(self, messages: list[Any]) -> list[Any]:
        """Put what the engine has counted before the last outputs of requests: a client that has its reply finds it counted."""
        said = [message for message in messages if message is not _LOOK]
        engine = self._engine
        if engine is None or (len(said) == len(messages) and not any(map(_ends, said))):
            return said
        levels = self._look(engine)
        if levels == self._levels:
            return said
        self._levels = levels
        return [levels, *said]

    def _look(self, engine: EngineLike) -> Levels:
        damaged = [each.memo.damaged if each.memo is not None else 0 for each in self._embedders]
        return Levels(engine.stats(), engine.healthy, damaged)


def _ends(message: object) -> bool:
    return isinstance(message, Output | NewTokens) and message.finish_reason is not None


def _facts(model: TextEmbedder) -> EmbedderFacts:
    embedder, memo = model.embedder, model.memo
    return EmbedderFacts(
        model.name,
        model.template.source,
        embedder.vocab,
        embedder.dimensions,
        embedder.max_tokens,
        memo.used if memo is not None else None,
        memo.gain if memo is not None else None,
    )
