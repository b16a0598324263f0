"""Which tokens to leave out of a prompt that does not fit, and where the KV of the rest is to be found again.

CachedAttention §3.4 (spec A12-A14, X2). What survives keeps its keys and values, embedded at new positions; but its deeper
layers have seen what was dropped, so it is no prefix of anything: it lives under a salt of its own, the *epoch*, that names
the tenant, all tokens up to the truncation, and what was dropped of them. Clients that resend everything each turn are
recognised by those tokens. Pure: no extents here, only token strings and ranges.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from afterglow.errors import RequestError

Rows = tuple[int, int]  # [start, stop)
TruncationPolicy = Literal["oldest", "sinks_and_recent"]

EPOCHS = 4096  # remembered; the least recently used are forgotten first
RESERVE = 8  # an eighth of the window, at most, is kept free for the answer
SINKS = 4  # first tokens that attention leans on whatever they say


def tenant_of(salt: str) -> str:
    """Whose rows lie under this salt."""
    return salt.partition("~")[0]


def is_private(salt: str) -> bool:
    """Do rows under this salt depend on tokens that are not before them?"""
    return "~" in salt


@dataclass(frozen=True, slots=True)
class Epoch:
    """A truncation. `rows`: untruncated tokens when it happened, of which `dropped` were left out."""

    tenant: str
    rows: int
    digest: str  # of those tokens
    dropped: tuple[Rows, ...]

    @property
    def salt(self) -> str:
        state = hashlib.blake2b(f"{self.rows} {self.digest} {self.dropped}".encode(), digest_size=12)
        return f"{self.tenant}~{state.hexdigest()}"

    def compact(self, tokens: bytes) -> bytes:
        """What remains of a token string."""
        return keep(tokens, self.dropped)

    def packed(self) -> str:
        """As text, for the catalog."""
        return json.dumps([self.tenant, self.rows, self.digest, self.dropped])

    @classmethod
    def unpacked(cls, text: str) -> Epoch:
        """The opposite of `packed`. Errors: ValueError."""
        tenant, rows, digest, dropped = json.loads(text)
        return cls(tenant, rows, digest, tuple((a, b) for a, b in dropped))


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the KV of a truncated prompt's first rows may be: `kept` rows of `tokens` under `salt`."""

    salt: str
    tokens: bytes
    kept: tuple[Rows, ...]


def digest_of(tokens: bytes) -> str:
    return hashlib.blake2b(tokens, digest_size=16).hexdigest()


def keep(tokens: bytes, dropped: Sequence[Rows]) -> bytes:
    """Tokens without those ranges (sorted, apart)."""
    return b"".join(tokens[4 * a : 4 * b] for a, b in complement(dropped, len(tokens) // 4))


def complement(ranges: Sequence[Rows], rows: int) -> tuple[Rows, ...]:
    """What of [0, rows) is in none of the ranges (sorted, apart)."""
    found, at = [], 0
    for start, stop in (*ranges, (rows, rows)):
        if at < min(start, rows):
            found.append((at, min(start, rows)))
        at = max(at, stop)
    return tuple(found)


def union(ranges: Sequence[Rows]) -> tuple[Rows, ...]:
    """The same rows as sorted ranges that do not touch."""
    found: list[Rows] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def ranges_of(indices: Sequence[int], rows: int) -> tuple[Rows, ...]:
    """A token discarding list (A14) as ranges. Errors: RequestError for what is not sorted, unique and within."""
    if any(b <= a for a, b in zip(indices, indices[1:], strict=False)):
        raise RequestError("the tokens to discard must be given in ascending order, each once", param="discard")
    if indices and not 0 <= indices[0] <= indices[-1] < rows:
        bad = indices[0] if indices[0] < 0 else indices[-1]
        raise RequestError(f"token {bad} cannot be discarded: the context has {rows} tokens", param="discard")
    if len(indices) >= rows:
        raise RequestError("not every token can be discarded", param="discard")
    return union([(i, i + 1) for i in indices])


@dataclass(frozen=True, slots=True)
class Rules:
    """How prompts are cut. `window`: longest context; `ratio` of it is cut away (the papers' 0.5)."""

    window: int
    ratio: float = 0.5
    policy: TruncationPolicy = "oldest"

    def fits(self, rows: int, max_tokens: int) -> bool:
        """Is there room for a prompt and some of its answer?"""
        return rows + max(min(max_tokens, self.window // RESERVE), min(1, max_tokens)) <= self.window

    def drop(self, rows: int, turns: Sequence[int], gone: Sequence[Rows]) -> tuple[Rows, ...]:
        """What to leave out of a prompt of `rows` rows, of which `gone` is out already: whole turns where they are known,
        the oldest first, until at most the other part of the window remains; never the system prompt, nor the last turn."""
        most = self.window - ceil(self.ratio * self.window)
        first = min(turns[0], rows) if turns else 0
        if self.policy == "sinks_and_recent":
            first = max(first, min(SINKS, rows))
        dropped = union(gone)
        if len(turns) > 1 and self.policy == "oldest":
            for start, stop in zip(turns, turns[1:], strict=False):
                if rows - count(dropped) <= most or stop > rows:
                    break
                dropped = union([*dropped, (start, stop)])
            return dropped
        recent = max(first, rows - max(most - first, 1))
        return union([*dropped, (first, recent)])


def count(ranges: Sequence[Rows]) -> int:
    return sum(stop - start for start, stop in ranges)


class Epochs:
    """All truncations that are remembered, by tenant and by the tokens they happened at."""

    def __init__(self) -> None:
        self._epochs: OrderedDict[str, Epoch] = OrderedDict()  # by salt, least recently used first
        self._lengths: dict[str, dict[int, dict[str, str]]] = {}  # tenant -> rows -> digest -> salt
        self._notes: dict[str, str | None] = {}

    def __len__(self) -> int:
        return len(self._epochs)

    def find(self, tenant: str, tokens: bytes) -> Epoch | None:
        """The latest truncation of a conversation of which these are all tokens so far."""
        for rows in sorted(self._lengths.get(tenant, ()), reverse=True):
            if 4 * rows <= len(tokens):
                salt = self._lengths[tenant][rows].get(digest_of(tokens[: 4 * rows]))
                if salt is not None:
                    self._epochs.move_to_end(salt)
                    return self._epochs[salt]
        return None

    def add(self, epoch: Epoch, note: bool = True) -> None:
        """Remember a truncation. Another one at the same tokens is replaced."""
        there = self._lengths.setdefault(epoch.tenant, {}).setdefault(epoch.rows, {})
        if epoch.digest in there:
            self._forget(there[epoch.digest])
            there = self._lengths.setdefault(epoch.tenant, {}).setdefault(epoch.rows, {})
        there[epoch.digest] = epoch.salt
        self._epochs[epoch.salt] = epoch
        if note:
            self._notes[epoch.salt] = epoch.packed()
        while len(self._epochs) > EPOCHS:
            self._forget(next(iter(self._epochs)))

    def forget_tenant(self, tenant: str | None) -> None:
        """Forget one tenant's truncations, or all."""
        for salt, epoch in list(self._epochs.items()):
            if tenant is None or epoch.tenant == tenant:
                self._forget(salt)

    def _forget(self, salt: str) -> None:
        epoch = self._epochs.pop(salt)
        by_rows = self._lengths[epoch.tenant]
        del by_rows[epoch.rows][epoch.digest]
        if not by_rows[epoch.rows]:
            del by_rows[epoch.rows]
        if not by_rows:
            del self._lengths[epoch.tenant]
        self._notes[salt] = None

    def take_notes(self) -> list[tuple[str, str | None]]:
        """What has changed since the last call, to be kept over restarts."""
        notes, self._notes = self._notes, {}
        return list(notes.items())

    def recall(self, notes: dict[str, str]) -> None:
        """After a restart. What cannot be read is ignored: it costs a prefill."""
        for text in notes.values():
            try:
                self.add(Epoch.unpacked(text), note=False)
            except (ValueError, TypeError):
                continue


def refuse_uncuttable(rules: Rules, rows: int, max_tokens: int, turns: Sequence[int]) -> None:
    """RequestError for a prompt that would not fit whatever is left out of it."""
    left = rows - count(rules.drop(rows, turns, ()))
    if not rules.fits(rows, max_tokens) and not rules.fits(left, max_tokens):
        raise RequestError(
            f"the prompt has {rows} tokens, of which {left} remain when all that may be dropped is dropped; the context"
            f" is {rules.window} tokens: shorten the system prompt or the last message",
            param="prompt",
            code="context_length_exceeded",
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """A prompt that was cut: its tokens, the salt under which its rows lie, and where the first of them may come from."""

    prompt: bytes
    salt: str
    dropped: int
    origin: Origin | None


def cut(
    epochs: Epochs, rules: Rules, tenant: str, tokens: bytes, max_tokens: int, turns: Sequence[int], relative: bool
) -> Cut | None:
    """Cut a prompt if it does not fit, or if its conversation has been cut before; None if neither.

    `relative`: can keys be embedded at new positions? Where positions were learned they cannot (A13): the rest is then
    an ordinary prompt, and is recomputed. Errors: RequestError where even the last turn does not fit.
    """
    rows = len(tokens) // 4
    epoch = epochs.find(tenant, tokens)
    dropped = epoch.dropped if epoch is not None else ()
    if rules.fits(rows - count(dropped), max_tokens):
        if epoch is None:
            return None
        return Cut(epoch.compact(tokens), epoch.salt if relative else tenant, count(dropped), None)
    before = epoch
    dropped = rules.drop(rows, turns, dropped)
    refuse_uncuttable(rules, rows, max_tokens, turns)
    epoch = Epoch(tenant, rows, digest_of(tokens), dropped)
    epochs.add(epoch)
    compact = epoch.compact(tokens)
    if not relative:
        return Cut(compact, tenant, count(dropped), None)
    return Cut(compact, epoch.salt, count(dropped), _origin(before, epoch, tokens))


def _origin(before: Epoch | None, epoch: Epoch, tokens: bytes) -> Origin:
    """The kept rows, in terms of what the conversation looked like just before."""
    kept = complement(epoch.dropped, len(tokens) // 4)
    if before is None:
        return Origin(epoch.tenant, tokens, kept)
    shifted = []
    for start, stop in kept:
        gone = count([(a, min(b, start)) for a, b in before.dropped if a < start])
        shifted.append((start - gone, stop - gone))  # nothing that was dropped before lies within
    return Origin(before.salt, before.compact(tokens), union(shifted))
