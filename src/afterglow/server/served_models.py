"""The model names that requests may give."""

from __future__ import annotations

from collections.abc import Container, Sequence

from afterglow.errors import RequestError
from afterglow.text.chat_template import shown


class ServedModels:
    """The names of the model that generates, and the names of models that only embed."""

    def __init__(self, names: Sequence[str], generates: bool, embedding: Container[str]) -> None:
        """`generates`: False where the model called `names` is an encoder. `embedding`: names of models that embed."""
        self.names = names
        self.generates = generates
        self._embedding = embedding

    def check(self, name: str | None, *, generate: bool = True) -> str:
        """Return the name of the model that a request means; without a name the default.

        Raises: RequestError, status 404, for an unknown model, and for one that only embeds where `generate` is set.
        """
        if name is None:
            name = self.names[0]
        if generate and name in self._embedding and not (self.generates and name in self.names):
            raise RequestError(
                f"{shown(name)} embeds texts and generates none; use it with /v1/embeddings or /v1/rerank",
                status=404,
                param="model",
                code="not_a_chat_model",
            )
        if name not in self.names:
            raise RequestError(
                f"the model {shown(name)} does not exist; this server has {', '.join(self.names)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return name
