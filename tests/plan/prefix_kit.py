"""A server with registered prefixes, on contents that say whose rows they are: those of the operator's prefix are the same
for all tenants, and every row behind it is of its tenant alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from afterglow.plan.prefix.shared_prefixes import OPERATOR
from afterglow.plan.retention.registered import PrefixState
from tests.plan import fake_executor
from tests.plan.fake_executor import TENANT, Text, next_row, pack
from tests.plan.lasting_kit import Lasting

PROMPTS: list[list[int]] = []  # the operator's, in this test


class PromptedText(Text):
    """A token string whose first rows are the operator's, where it begins with all of one of the operator's prompts."""

    def __init__(self, salt: str, tokens: list[int]) -> None:
        found = max((p for p in PROMPTS if salt != OPERATOR and tokens[: len(p)] == p), key=len, default=[])
        super().__init__(OPERATOR if found else salt, found)
        if found:
            self.start = self.rows[-1] + b" salt " + salt.encode()
            self.tenant = salt
            for token in tokens[len(found) :]:
                before = self.rows[-1] if len(self.rows) > len(found) else self.start
                self.rows.append(next_row(before, token))
                self.tokens.append(token)
                TENANT[self.rows[-1]] = salt
            self.first = len(found)
        else:
            self.first = 0
            for token in tokens:
                self.append(token)

    def append(self, token: int) -> None:
        if len(self.rows) == getattr(self, "first", 0):
            self.rows.append(next_row(self.start, token))
            self.tokens.append(token)
            TENANT[self.rows[-1]] = self.tenant
        else:
            super().append(token)


@contextmanager
def prompted(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows are told apart as above."""
    patch.setattr(fake_executor, "Text", PromptedText)
    PROMPTS.clear()
    yield
    PROMPTS.clear()


class Prompting(Lasting):
    """An engine with registered prefixes."""

    def __init__(self, **more: object) -> None:
        super().__init__(**{"disk_bytes": 100_000, "source": "load", **more})

    def register(self, tokens: Sequence[int], salt: str = OPERATOR, name: str = "prompt") -> int:
        """The job that computed it."""
        self.scheduler.register_prefix(salt, name, pack(list(tokens)), "about it", self.now)
        if salt == OPERATOR and list(tokens) not in PROMPTS:
            PROMPTS.append(list(tokens))
            self.ends.clear()  # what ended before is not compared again: whose rows are whose has changed
        return self.ask(tokens, max_tokens=0, salt=salt)

    def state(self, salt: str = OPERATOR, name: str = "prompt") -> PrefixState:
        (found,) = (each for each in self.scheduler.cache.registered.listing()[salt] if each.name == name)
        return found

    def cached(self, prompt: Sequence[int], salt: str = "") -> int:
        """How much of a prompt was there already."""
        return sum(self.hits(self.ask(prompt, salt=salt)))
