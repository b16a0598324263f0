"""The replies of one HTTP request on their way: what arrives, what it cost, and their end."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from afterglow.request import CachedTokens
from afterglow.server.assemble import Piece
from afterglow.server.jobs import Choice, Group
from afterglow.server.state import Record, State
from afterglow.text import ChatPrompt


class Run:
    """The replies of one HTTP request on their way, with their accounts."""

    def __init__(
        self,
        state: State,
        record: Record,
        choices: Sequence[Choice],
        per_prompt: int = 1,
        chat: ChatPrompt | None = None,
    ) -> None:
        """`chat`: what they answer, if it is a conversation."""
        self.choices = choices
        self._chat = chat
        self._per_prompt = per_prompt
        self._metrics = state.metrics
        self._record = record
        record.prompt_tokens = self.prompt_tokens
        self._began = time.perf_counter()
        self._first: dict[int, float] = {}  # when a choice had its first token
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
                    self._first.setdefault(index, now)
                if piece.finish is not None:
                    self._account(index, now)
                record.cached = self.cached
                record.prompt_tokens = self.prompt_tokens
                yield index, piece
        finally:
            self.close()

    def _account(self, index: int, now: float) -> None:
        """A choice has ended as it should."""
        reply = self.choices[index].assembler
        first = self._first.get(index, now)
        self._metrics.finished(
            prompt=self._prompt_of(index),
            generated=len(reply.tokens),
            queue=reply.waited,
            prefill=max(0.0, first - self._began - reply.waited),
            decode=now - first,
        )
        if len(reply.tokens) > 1:
            self._record.per_token.append((now - first) / (len(reply.tokens) - 1))
        start = index - index % self._per_prompt
        siblings = self.choices[start : start + self._per_prompt]
        if all(choice.assembler.finish is not None for choice in siblings):
            self._metrics.most_generated.observe(max(len(choice.assembler.tokens) for choice in siblings))

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
        return sum(self._prompt_of(index) for index in range(0, len(self.choices), self._per_prompt))

    def _prompt_of(self, index: int) -> int:
        choice = self.choices[index]
        cut = choice.assembler.truncation
        return len(choice.request.prompt) - (cut.dropped if cut is not None else 0)

    @property
    def missed(self) -> dict[str, int]:
        """Of the prompt tokens that were computed, how many for which reason: they were not in the cache, or they were and
        computing them was predicted to be faster (`recomputed`). With those that were cached they are all there are."""
        found: dict[str, int] = {}
        for index in range(0, len(self.choices), self._per_prompt):
            reply = self.choices[index].assembler
            rest = self._prompt_of(index) - reply.cached.total - reply.missed.tokens
            for reason, tokens in ((reply.missed.reason, reply.missed.tokens), ("recomputed", rest)):
                if tokens > 0:
                    found[reason] = found.get(reason, 0) + tokens
        return found

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
        uncut = self._chat.uncut if self._chat is not None else None
        return said if uncut is None else {**said, "note": f"not cut between turns: {uncut}"}

    def replies(self) -> dict[str, int] | None:
        """How the replies that came back in a conversation became tokens, if there were any."""
        if self._chat is None or not self._chat.spliced + self._chat.retokenised:
            return None
        return {"spliced": self._chat.spliced, "retokenised": self._chat.retokenised}

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
        replies, truncation, selected = self.replies(), self.truncation(), self.selected()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._record.generated,
            "total_tokens": prompt + self._record.generated,
            "prompt_tokens_details": {"cached_tokens": cached.total},
            "cached_tokens_details": {"device": cached.device, "host": cached.host, "disk": cached.disk},
            "missed_tokens_details": self.missed,
            **({"replies_details": replies} if replies is not None else {}),
            **({"truncation": truncation} if truncation is not None else {}),
            **({"kv_selection": selected} if selected is not None else {}),
        }
