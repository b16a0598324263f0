"""The models that embed, with the thread that runs them.

Imports torch only where there is a model: a server's mistakes are found before that takes its seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from afterglow.errors import RequestError
from afterglow.server.engine_like import EngineLike
from afterglow.server.metrics.collector import EmbeddingMetrics
from afterglow.text.chat_template import shown

if TYPE_CHECKING:
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
