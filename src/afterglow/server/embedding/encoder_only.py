"""The stand-in for the engine where the only model is an encoder: generates nothing and caches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from afterglow.config import EngineConfig
from afterglow.engine.grammars.compiler import Grammars
from afterglow.engine.stats import EngineStats
from afterglow.errors import RequestError
from afterglow.request import PrefixInfo, Request, SessionInfo
from afterglow.store.database.conversations import Conversations

if TYPE_CHECKING:
    from afterglow.engine.shared_ids import SharedIds
    from afterglow.memo.texts import TextEmbedder


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
