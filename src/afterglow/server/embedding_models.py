"""The models that embed, with the thread that runs them; and the stand-in for the engine where the only model is an encoder.

The thread embeds in batches over all waiting requests. It runs forward passes beside the engine's thread, on the same weights, which
neither thread writes to. To keep replies fast, its passes are small while the engine has work, and its threads have a lower priority (Linux).

Imports no code of models: a server's mistakes are found before that takes its seconds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from afterglow.config import EngineConfig
from afterglow.engine.grammars.compiler import Grammars
from afterglow.engine.stats import EngineStats
from afterglow.errors import RequestError, shutting_down
from afterglow.listings import PrefixInfo, SessionInfo
from afterglow.request import Request
from afterglow.server.bridge import EngineLike
from afterglow.server.metrics.collector import EmbeddingMetrics
from afterglow.store.database.conversations import Conversations
from afterglow.text.chat_template import shown
from afterglow.thread_priority import give_way

if TYPE_CHECKING:
    from afterglow.engine.shared_ids import SharedIds
    from afterglow.memo.sequence_embedder import EmbedResult
    from afterglow.memo.texts import TextEmbedder


log = logging.getLogger("afterglow.server")

PASS_TOKENS = 1024  # of one pass, while the engine is idle
PASS_TOKENS_BUSY = 128  # while the engine works: about as long as one of its steps


@dataclass(slots=True, eq=False)
class EmbeddingJob:
    """The sequences of one request; [0, begun) have been taken into a pass."""

    model: TextEmbedder
    sequences: Sequence[Sequence[int]]
    vectors: Tensor
    hits: list[bool]
    begun: int = 0
    done: int = 0
    future: Future[EmbedResult] = field(default_factory=Future)


class EmbeddingWorker:
    """Embeds for any number of models, on one thread. `start` begins it, `close` ends it."""

    def __init__(
        self, busy: Callable[[], bool], max_queue: int, passed: Callable[[str, int, int, float], None] | None = None
    ) -> None:
        """Prepare the thread. `busy`: whether the engine has requests. `max_queue`: requests that may wait. `passed` is
        told of each pass: model, sequences, tokens, seconds."""
        self._busy, self._max_queue = busy, max_queue
        self._passed = passed or (lambda name, sequences, tokens, seconds: None)
        self.jobs: deque[EmbeddingJob] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._main, name="afterglow-embed", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current pass; waiting requests get an error."""
        with self._wake:
            self._closing = True
            jobs = list(self.jobs)
            self.jobs.clear()
            self._wake.notify()
        for job in jobs:
            _settle(job, shutting_down())
        if self._thread.is_alive():
            self._thread.join()

    async def embed(self, model: TextEmbedder, sequences: Sequence[Sequence[int]]) -> EmbedResult:
        """Embed checked sequences (see `Embedder.check`). Raises: RequestError, if too many requests wait."""
        size = (len(sequences), model.embedder.dimensions)
        job = EmbeddingJob(model, sequences, torch.empty(size), [False] * len(sequences))
        with self._wake:
            if self._closing:
                raise shutting_down()
            waiting = sum(not other.future.cancelled() for other in self.jobs)
            if waiting >= self._max_queue:
                raise RequestError(
                    f"{waiting} embedding requests are waiting already (--max-queue); try again later",
                    status=429,
                    code="queue_full",
                )
            self.jobs.append(job)
            self._wake.notify()
        return await asyncio.wrap_future(job.future)  # the future is cancelled too, if the client leaves

    def _main(self) -> None:
        # Measured on a busy machine of two cores, eight clients that embed without a pause: a reply's tokens take 2.1 times
        # as long without this, 1.3 times with it.
        give_way()
        while True:
            with self._wake:
                while not self.jobs and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
                batch = self._take(PASS_TOKENS_BUSY if self._engine_works() else PASS_TOKENS)
            if not batch:
                continue  # all had left
            model = batch[0][0].model
            ids = [job.sequences[index] for job, index in batch]
            began = time.perf_counter()
            try:
                result = model.embedder.embed(ids)
            except Exception as error:
                if not isinstance(error, RequestError):
                    log.exception("embedding failed")
                self._fail({id(job): job for job, _ in batch}, error)
                continue
            self._passed(model.name, len(ids), result.tokens, time.perf_counter() - began)
            self._deliver(batch, result)

    def _engine_works(self) -> bool:
        try:
            return self._busy()
        except Exception:  # the engine has died: embedding goes on
            return False

    def _take(self, most: int) -> list[tuple[EmbeddingJob, int]]:
        """Take the next pass: sequences of one model, from each waiting job in turn, at most `most` tokens or one
        sequence."""
        batch: list[tuple[EmbeddingJob, int]] = []
        size = 0
        waiting = deque(job for job in self.jobs if not job.future.cancelled())
        self.jobs = deque(waiting)
        if waiting:
            model = waiting[0].model
            waiting = deque(job for job in waiting if job.model is model)
        while waiting:
            job = waiting.popleft()
            length = len(job.sequences[job.begun])
            if batch and size + length > most:
                break
            batch.append((job, job.begun))
            job.begun += 1
            size += length
            if job.begun < len(job.sequences):
                waiting.append(job)
            else:
                self.jobs.remove(job)
        # Jobs that were served go behind the others: many large jobs take turns, of several models too.
        served = {id(job) for job, _ in batch}
        self.jobs = deque(sorted(self.jobs, key=lambda job: id(job) in served))
        return batch

    def _deliver(self, batch: Sequence[tuple[EmbeddingJob, int]], result: EmbedResult) -> None:
        from afterglow.memo.sequence_embedder import EmbedResult  # known by now: it made the result

        for row, (job, index) in enumerate(batch):
            job.vectors[index] = result.vectors[row]
            job.hits[index] = result.hits[row]
            job.done += 1
            if job.done == len(job.sequences):
                tokens = sum(map(len, job.sequences))
                _settle(job, EmbedResult(job.vectors, tokens, tuple(job.hits)))

    def _fail(self, jobs: Mapping[int, EmbeddingJob], error: Exception) -> None:
        known = error if isinstance(error, RequestError) else RequestError("internal error", status=500)
        with self._wake:
            self.jobs = deque(job for job in self.jobs if id(job) not in jobs)
        for job in jobs.values():
            _settle(job, known)


def _settle(job: EmbeddingJob, outcome: EmbedResult | RequestError) -> None:
    if job.future.done() or not job.future.set_running_or_notify_cancel():
        return  # the client has left, or the job was failed already
    if isinstance(outcome, RequestError):
        job.future.set_exception(outcome)
    else:
        job.future.set_result(outcome)


class EmbeddingModels:
    """The models that embed: the one that generates, and the one beside it."""

    def __init__(
        self, models: Sequence[TextEmbedder], own: Sequence[str], engine: EngineLike, registry: CollectorRegistry
    ) -> None:
        """The first of `models` serves requests without a model's name. The engine's model, if `models` has it, answers to
        all its `own` names."""
        self.names: dict[str, TextEmbedder] = {}
        for model in models:
            self.names |= dict.fromkeys(own if model.name in own else (model.name,), model)
        self.default = models[0] if models else None
        self.metrics = EmbeddingMetrics(registry)
        self.worker: EmbeddingWorker | None = None
        if not models:
            return
        for model in models:
            if model.memo is not None:
                self.metrics.watch(model.name, model.memo)
        self.worker = EmbeddingWorker(
            lambda: engine.stats().plan.running > 0, engine.config.max_queue, self.metrics.passed
        )

    def find(self, name: str | None) -> TextEmbedder:
        """Return the model that a request means. Raises: RequestError, status 404."""
        if self.default is None:
            raise RequestError(
                "this server has no model that embeds; start it with --embedding-model",
                status=404,
                code="no_embedding_model",
            )
        if name is None:
            return self.default
        if name not in self.names:
            raise RequestError(
                f"the model {shown(name)} does not exist; this server embeds with {', '.join(self.names)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self.names[name]


class EncoderOnly:
    """An `EngineLike` that refuses to generate."""

    healthy = True

    def __init__(self, model: TextEmbedder, config: EngineConfig) -> None:
        self.model_name = model.name
        self.config = config
        self.max_model_len = model.embedder.max_tokens
        self.vocab_size = model.embedder.vocab
        self.grammars = Grammars(self.vocab_size, ())
        self.shared_ids: SharedIds | None = None
        self.conversations = Conversations(None)

    def submit(self, request: Request, sink: Any) -> None:
        raise RequestError(f"{self.model_name!r} embeds texts and generates none", status=404)

    def expect(self, prompts: Sequence[Request], after: str | None = None) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats()

    def reset_cache(self, salt: str | None = None, *, tenant: str | None = None) -> None: ...

    def sessions(self, salt: str) -> list[SessionInfo]:
        return []

    def forget_session(self, salt: str, name: str) -> bool:
        return False

    def pin_session(self, salt: str, name: str, pinned: bool) -> bool:
        return False

    def register_prefix(
        self, name: str, tokens: Sequence[int], *, salt: str | None = "", about: str = ""
    ) -> PrefixInfo:
        raise RequestError(f"{self.model_name!r} embeds texts and generates none", status=404)

    def forget_prefix(self, name: str, *, salt: str | None = "") -> bool:
        return False

    def prefixes(self, salt: str | None = "") -> list[PrefixInfo]:
        return []

    def all_prefixes(self) -> dict[str, list[PrefixInfo]]:
        return {}
