"""The engine of another process, as the server sees it."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import torch

from afterglow.engine.engine import Engine
from afterglow.engine.stats import EngineStats
from afterglow.errors import AfterglowError, RequestError, UserError, engine_dead, shutting_down
from afterglow.memo.sequence_embedder import Embedder, EmbedResult, SequenceLimits
from afterglow.memo.texts import MemoUse, Template, TextEmbedder
from afterglow.request import Grammar, Output, Request
from afterglow.server.engine_process.channel import (
    Answer,
    Call,
    Channel,
    EmbedderFacts,
    EngineFacts,
    Levels,
    Yielded,
)
from afterglow.server.engine_process.far import Far
from afterglow.server.engine_process.outputs import NewTokens, OutputReader
from afterglow.store.database.conversations import Conversations
from afterglow.text import Tokenizer

log = logging.getLogger("afterglow.server")

CLOSE_SECONDS = 150.0  # for an engine that writes its cache to disk; it gives up by itself before
KILL_SECONDS = 5.0


class EngineProcess:
    """An `EngineLike` whose engine runs in another process. Ends with it: requests get errors from then on."""

    def __init__(self, module: str, first: object) -> None:
        """Start `python -m module HANDLE`, send it `first`, and wait until its `EngineHost` serves. Raises: UserError, as it does."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # Modules come from where this process has its own: without -P also from the folder where it was started.
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the server alone
            )
        self._channel = Channel(ours)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._sinks: dict[str, Callable[[Output], None]] = {}  # by request id
        self._outputs = OutputReader()
        self._ended: Callable[[], RequestError] | None = None  # makes the error of all that is asked then
        self._closing = False
        try:
            self._channel.send(first)
            self._facts = facts = self._started()
        except BaseException as error:
            if not isinstance(error, UserError):  # Ctrl-C: there is nothing to write yet, and nothing to say
                self._process.kill()
            self._channel.close()  # by which the process ends
            self._end(KILL_SECONDS)
            raise
        self._levels = facts.levels
        self.model_name = facts.model_name
        self.config = facts.config
        self.max_model_len = facts.max_model_len
        self.vocab_size = facts.vocab_size
        engine = cast(Engine, Far(self.call, "engine"))
        self.grammars = FarGrammars(engine)
        self.conversations = cast(Conversations, Far(self.call, "engine.conversations", folder=facts.folder))
        self.shared_ids = engine.shared_ids if facts.shares else None
        self.sessions = engine.sessions
        self.forget_session = engine.forget_session
        self.pin_session = engine.pin_session
        self.register_prefix = engine.register_prefix
        self.forget_prefix = engine.forget_prefix
        self.prefixes = engine.prefixes
        self.all_prefixes = engine.all_prefixes
        threading.Thread(target=self._read, name="afterglow-answers", daemon=True).start()

    def embedders(self, tokenizers: Mapping[str, Tokenizer]) -> list[TextEmbedder]:
        """Make the models that embed there, the default first. `tokenizers`: by the models' names."""
        return [
            self._embedder(index, facts, tokenizers[facts.name]) for index, facts in enumerate(self._facts.embedders)
        ]

    @property
    def healthy(self) -> bool:
        """Tell whether the process lives, and its engine runs."""
        return self._ended is None and self._levels.healthy

    def stats(self) -> EngineStats:
        """Return counters and levels as they were last told: with the last output of a request, and twice a second."""
        return self._levels.stats

    def submit(self, request: Request, sink: Callable[[Output], None]) -> Future[None]:
        """Submit a request. The result is there when the engine has queued it; raises: RequestError. A thread of this object calls
        `sink`."""
        self._sinks[request.id] = sink
        asked: Future[None] = self._ask("host.submit", (request,), {})
        asked.add_done_callback(lambda done: done.exception() and self._sinks.pop(request.id, None))
        return asked

    def expect(self, prompts: Sequence[Request], after: str | None = None) -> None:
        """See `Engine.expect`."""
        self._tell("engine.expect", prompts, after)

    def cancel(self, request_id: str) -> None:
        """See `Engine.cancel`."""
        self._tell("engine.cancel", request_id)

    def reset_cache(self, salt: str | None = None, *, tenant: str | None = None) -> None:
        """See `Engine.reset_cache`."""
        self._tell("engine.reset_cache", salt, tenant=tenant)

    def call(self, path: str, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Make a call in the engine's process, and wait for the result. Raises: its error; RequestError, when the process has ended."""
        found = self._ask(path, args, named).result()
        return self._each(found.name) if isinstance(found, Yielded) else found

    def close(self) -> None:
        """End the engine, which writes its cache to disk, and its process. May be called twice.

        Raises: AfterglowError, when the process did not end as it should.
        """
        if self._closing:
            return
        self._closing = True
        self._tell("host.end")
        code = self._end(CLOSE_SECONDS)
        self._channel.close()
        if code and self._ended is not engine_dead:
            raise AfterglowError(
                f"the engine's process {_end_of(code)} while it closed: rows that were not on disk yet are lost, and are "
                "computed again when they are needed"
            )

    def kill(self) -> None:
        """End the process at once. What is on disk stays valid, and nothing more is written."""
        self._closing = True
        self._process.kill()

    # ------------------------------------------------------------------------------------------------------- messages

    def _started(self) -> EngineFacts:
        """Wait until the models are loaded. Raises: UserError, with what is wrong."""
        try:
            found = next(each for each in self._channel.receive() if not isinstance(each, Levels))
        except EOFError:
            raise UserError(f"the engine's process {_end_of(self._process.wait())} before it served") from None
        if isinstance(found, UserError):
            raise found
        return cast(EngineFacts, found)

    def _ask(self, path: str, args: Sequence[Any], named: Mapping[str, Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # the call goes on, whether its answer is waited for or not
        with self._lock:
            if self._ended is not None:
                raise self._ended()
            number = next(self._numbers)
            self._answers[number] = answer
        self._channel.send(Call(number, path, args, named))
        return answer

    def _tell(self, path: str, *args: Any, **named: Any) -> None:
        self._channel.send(Call(None, path, args, named))

    def _each(self, name: str) -> Iterator[Any]:
        try:
            while found := self.call("host.take", (name,), {}):
                yield found[0]
        finally:
            self._tell("host.drop", name)

    def _read(self) -> None:
        try:
            while True:
                for message in self._channel.receive():
                    self._take(message)
        except EOFError:
            pass
        except Exception:  # otherwise all that is asked would be waited for without end
            log.exception("messages of the engine's process could not be read")
            self._channel.hang_up()  # by which the process ends
        with self._lock:
            self._ended = shutting_down if self._closing else engine_dead
            waiting = list(self._answers.values())
            self._answers.clear()
        for answer in waiting:
            answer.set_exception(self._ended())
        if self._ended is engine_dead:
            log.error("the engine's process %s; the server must be restarted", _end_of(self._process.wait()))

    def _take(self, message: Answer | Levels | NewTokens | Output) -> None:
        if isinstance(message, Output | NewTokens):
            self._deliver(self._outputs.whole(message))
        elif isinstance(message, Levels):
            self._levels = message
        else:
            with self._lock:
                answer = self._answers.pop(message.number)
            if message.error is not None:
                answer.set_exception(message.error)
            else:
                answer.set_result(message.value)

    def _deliver(self, output: Output) -> None:
        sink = self._sinks.get(output.request_id)
        if output.finish_reason is not None:
            self._sinks.pop(output.request_id, None)
        if sink is not None:
            sink(output)

    def _end(self, seconds: float) -> int:
        """Wait for the end of the process, and end it then. Returns its exit code."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            log.warning("the engine's process is killed: it has not ended within %.0f s", seconds)
            self._process.kill()
            return self._process.wait()

    def _embedder(self, index: int, facts: EmbedderFacts, tokenizer: Tokenizer) -> TextEmbedder:
        memo = None
        if facts.memo_used is not None:
            memo = cast(MemoUse, FarMemo(facts, lambda: self._levels.damaged[index]))
        embedder = cast(Embedder, FarEmbedder(self.call, index, facts))
        return TextEmbedder(facts.name, embedder, tokenizer, Template(facts.template), memo)


def _end_of(code: int) -> str:
    """Say how a process ended, by its exit code."""
    return f"was killed by signal {-code}" if code < 0 else f"has ended with code {code}"


class FarGrammars:
    """Has grammars compiled where they are used. They wait there for the request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def check(self, grammar: Grammar | None) -> None:
        """See `Grammars.check`. Raises: RequestError."""
        if grammar is not None:
            self._engine.grammars.check(grammar)

    def use_tokenizer(self, read: Callable[[], str]) -> None:
        """Ignore a tokenizer: the engine's process has read its own."""


class FarEmbedder(SequenceLimits):
    """Embeds in the other process; what cannot be embedded is refused here."""

    def __init__(self, call: Callable[..., Any], index: int, facts: EmbedderFacts) -> None:
        super().__init__(facts.vocab, facts.dimensions, facts.max_tokens)
        self._call, self._index = call, index

    def embed(self, sequences: Sequence[Sequence[int]]) -> EmbedResult:
        """See `Embedder.embed`. Raises: RequestError."""
        vectors, tokens, hits = self._call("host.embed", (self._index, sequences), {})
        return EmbedResult(torch.from_numpy(vectors), tokens, hits)


class FarMemo:
    """Tells what the memo of an embedder in the other process is used for."""

    def __init__(self, facts: EmbedderFacts, damaged: Callable[[], int]) -> None:
        self.used, self.gain = bool(facts.memo_used), facts.memo_gain
        self._damaged = damaged

    @property
    def damaged(self) -> int:
        """Count maps that were found damaged."""
        return self._damaged()
