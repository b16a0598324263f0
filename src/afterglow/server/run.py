"""The replies of one HTTP request on their way: what arrives, what it cost, and their end."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from afterglow.request import CachedTokens
from afterglow.server.assemble import Piece
from afterglow.server.jobs import Choice, Group
from afterglow.server.state import Record, State


class Run:
    """The replies of one HTTP request on their way, with their accounts."""

    def __init__(
        self, state: State, record: Record, choices: Sequence[Choice], per_prompt: int = 1, uncut: str | None = None
    ) -> None:
        """`uncut`: why the prompt could not be cut between turns."""
        self.choices = choices
        self._uncut = uncut
        self._per_prompt = per_prompt
        self._metrics = state.metrics
        self._record = record
        record.prompt_tokens = self.prompt_tokens
        self._group: Group = state.jobs.start(choices)

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """What arrives, choice by choice. Jobs end with the iteration, however it ends: close it."""
        record = self._record
        try:
            async for index, piece in self._group.pieces():
                now = time.perf_counter()
                if piece.tokens:
                    if record.ttft is None:
                        record.ttft = now - record.began
                    elif len(self.choices) == 1:
                        self._metrics.inter_token.observe((now - record.last_token) / len(piece.tokens))
                    record.last_token = now
                    record.generated += len(piece.tokens)
                record.cached = self.cached
                record.prompt_tokens = self.prompt_tokens
                yield index, piece
        finally:
            self.close()

    def close(self) -> None:
        """Cancel what still runs. Idempotent."""
        self._group.close()

    @property
    def cached(self) -> CachedTokens:
        """By tier. Further replies to a prompt find all of it cached by the first: they do not count."""
        found = [c.assembler.cached for c in self.choices[:: self._per_prompt]]
        return CachedTokens(*(sum(getattr(c, tier) for c in found) for tier in ("device", "host", "disk")))

    @property
    def prompt_tokens(self) -> int:
        """Of the prompts as they were answered: without what was left out of them."""
        dropped = [c.assembler.truncation.dropped if c.assembler.truncation else 0 for c in self.choices]
        prompts = [len(c.request.prompt) - n for c, n in zip(self.choices, dropped, strict=True)]
        return sum(prompts[:: self._per_prompt])

    def truncation(self) -> dict[str, Any] | None:
        """What was left out of the prompt, if something was."""
        found = self.choices[0].assembler.truncation
        if found is None:
            return None
        said = {
            "dropped_tokens": found.dropped,
            "kept_tokens": found.kept,
            "reused": found.reused,
            "policy": found.policy,
        }
        return said if self._uncut is None else {**said, "note": f"not cut between turns: {self._uncut}"}

    def selected(self) -> dict[str, Any] | None:
        """Of the cached prompt tokens, how many the reply attended to, if not to all (an approximation)."""
        found = self.choices[0].assembler.selected
        if found is None:
            return None
        return {
            "tokens": found.rows,
            "kept_tokens": round(found.kept, 1),
            "layers": found.layers,
            "fallback_layers": found.fallbacks,
            "taken_tokens": round(found.taken, 1),
            "renewals": found.renewals,
        }

    def usage(self) -> dict[str, Any]:
        prompt = self.prompt_tokens
        cached = self.cached
        truncation, selected = self.truncation(), self.selected()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._record.generated,
            "total_tokens": prompt + self._record.generated,
            "prompt_tokens_details": {"cached_tokens": cached.total},
            "cached_tokens_details": {"device": cached.device, "host": cached.host, "disk": cached.disk},
            **({"truncation": truncation} if truncation is not None else {}),
            **({"kv_selection": selected} if selected is not None else {}),
        }
