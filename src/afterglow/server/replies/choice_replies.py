"""The answer of `/v1/completions` and `/v1/chat/completions`: a list of choices, whole or as events."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from afterglow.library.assemble import Piece
from afterglow.server.bodies.reply_bodies import ChoicesBody
from afterglow.server.replies.pending_replies import Replies
from afterglow.server.replies.stream import DONE, event


class ChoiceReplies(Replies):
    """Replies that are written as choices."""

    body: ChoicesBody

    @abstractmethod
    def head(self) -> dict[str, Any]:
        """Return the fields that all events begin with."""

    @abstractmethod
    async def chunk(self, index: int, piece: Piece, first: bool) -> dict[str, Any] | None:
        """Write the new part of a reply: `choices` and the fields beside it; None if the part is empty."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        async with aclosing(self.pieces()) as pieces:
            async for index, piece in pieces:
                chunk = await self.chunk(index, piece, first=index not in begun)
                begun.add(index)
                if chunk is None:
                    continue
                chunk = {**self.head(), **chunk}
                if self.body.include_usage:
                    chunk["usage"] = self.usage() if self.body.continuous_usage else None
                yield event(chunk)
        if self.body.include_usage:
            yield event({**self.head(), "choices": [], "usage": self.usage()})
        yield DONE

    def ids(self, tokens: Sequence[int], prompt: Sequence[int] | None = None) -> dict[str, Sequence[int]]:
        """Return the fields for token ids, where the client wants them; `prompt`: those of the prompt as well."""
        if not self.body.return_token_ids:
            return {}
        return {**({"prompt_token_ids": prompt} if prompt is not None else {}), "token_ids": tokens}
