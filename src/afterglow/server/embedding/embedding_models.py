"""The models that embed, with the thread that runs them; and the stand-in for the engine where the only model is an encoder.

Imports torch only where there is a model: a server's mistakes are found before that takes its seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from afterglow.config import EngineConfig
from afterglow.engine.grammars.compiler import Grammars
from afterglow.engine.stats import EngineStats
from afterglow.errors import RequestError
from afterglow.request import PrefixInfo, Request, SessionInfo
from afterglow.server.bridge import EngineLike
from afterglow.server.metrics.collector import EmbeddingMetrics
from afterglow.store.database.conversations import Conversations
from afterglow.text.chat_template import shown

if TYPE_CHECKING:
    from afterglow.engine.shared_ids import SharedIds
    from afterglow.memo.texts import TextEmbedder
    from afterglow.server.embedding.embedding_worker import EmbeddingWorker


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
        from afterglow.server.embedding.embedding_worker import EmbeddingWorker

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
        self.vocab_size = model.embedder.model.spec.vocab
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
