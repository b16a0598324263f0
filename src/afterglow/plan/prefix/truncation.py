"""Which tokens to leave out of a prompt that does not fit, and where the KV of the rest is to be found again.

CachedAttention §3.4; by a policy where a prompt is too long, by a list that the caller gives (a token
discarding list) at any time. Rows that survive keep their keys and values, embedded at new positions; but their deeper
layers have seen the dropped rows, so they are no prefix of other prompts: they lie under a salt of their own, the *epoch*,
which names the tenant, all tokens up to the truncation, and the dropped ranges. Clients that resend everything each turn
are recognised by those tokens. Pure: no extents here, only token strings and ranges.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import Literal

from afterglow.choices import TruncationPolicy
from afterglow.errors import RequestError
from afterglow.plan.prefix.ranges import Rows, checked, complement, count, keep, union
from afterglow.plan.prefix.salts import covers
from afterglow.request import ContextWindow

Reason = TruncationPolicy | Literal["discard"]  # why tokens are gone: a policy, or a client's list

MAX_EPOCHS = 2**15  # remembered; the least recently used are forgotten first
MAX_RANGES = 2**18  # dropped by all epochs together: 32 MB or so, where single tokens were chosen
DIGEST_BYTES = 16  # bytes
HEAD_TOKENS = 16  # tokens that conversations mostly differ in, if they do not begin with the same system prompt
SINK_TOKENS = 4  # first tokens that attention leans on whatever they say


@dataclass(frozen=True, slots=True)
class Epoch:
    """A truncation. `rows`: untruncated tokens when it happened; `dropped`: those left out, for this `reason`."""

    tenant: str
    rows: int
    digest: str  # of the untruncated tokens
    dropped: tuple[Rows, ...]
    reason: Reason = "oldest"
    head: str = ""  # of its first tokens, see `head_of`: what it is looked up by before anything else

    @property
    def salt(self) -> str:
        state = hashlib.blake2b(f"{self.rows} {self.digest} {self.dropped}".encode(), digest_size=12)
        return f"{self.tenant}~{state.hexdigest()}"

    def compact(self, tokens: bytes) -> bytes:
        """What remains of a token string."""
        return keep(tokens, self.dropped)

    def packed(self) -> str:
        """As text, for the catalog."""
        steps = _steps(self.dropped)  # short numbers: thousands of single tokens may be dropped
        values = [self.tenant, self.rows, self.digest, steps, self.reason, self.head]
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def unpacked(cls, text: str) -> Epoch:
        """Read the text of `packed`.

        Raises:
            ValueError: it is none, or drops nothing.
        """
        tenant, rows, digest, steps, reason, head = json.loads(text)
        if not steps:
            raise ValueError("a truncation that dropped nothing")
        ends = list(accumulate(steps))
        return cls(tenant, rows, digest, tuple(zip(ends[::2], ends[1::2], strict=True)), reason, head)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the KV of a truncated prompt's first rows may be: `kept` rows of `tokens` under `salt`."""

    salt: str
    tokens: bytes
    kept: tuple[Rows, ...]


def _steps(ranges: Sequence[Rows]) -> list[int]:
    """Return the distances from each end of a range to the next."""
    ends = [end for each in ranges for end in each]
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def digest_of(tokens: bytes) -> str:
    return hashlib.blake2b(tokens, digest_size=DIGEST_BYTES).hexdigest()


def head_of(tokens: bytes) -> str:
    """Four bytes, in hex, that stand for a conversation's beginning; empty if there are too few tokens."""
    head = tokens[: 4 * HEAD_TOKENS]
    return hashlib.blake2b(head, digest_size=4).hexdigest() if len(head) == 4 * HEAD_TOKENS else ""


@dataclass(frozen=True, slots=True)
class Rules:
    """How prompts are cut. `ratio` of the window is cut away (the papers' 0.5)."""

    window: ContextWindow
    ratio: float = 0.5
    policy: TruncationPolicy = "oldest"

    @property
    def most(self) -> int:
        """Tokens that remain of a prompt that is cut, at most (but for a longer system prompt, and a last turn)."""
        limit = self.window.limit
        # Beside the longest prompt a reply has its reserved part.
        return min(limit - ceil(self.ratio * limit), self.window.longest(limit))

    def drop(
        self, rows: int, turns: Sequence[int], gone: Sequence[Rows], scores: Sequence[float] = ()
    ) -> tuple[Rows, ...]:
        """Choose rows to leave out of a prompt of `rows` rows, besides those in `gone`: whole turns where they are known,
        the oldest first, until at most the other part of the window remains; never the system prompt, nor the last turn.
        `oldest_tokens` takes that part of the window away instead, once or until the rest fits. Where nothing stands before the
        first turn, its first `SINK_TOKENS` stay, if there is room for them beside the last turn and a reply: rows that were computed behind
        them lean on them.

        `scores`: how important its first rows are, for `importance`, which does as `sinks_and_recent` without.
        """
        first = min(turns[0], rows) if turns else 0
        last = rows - turns[-1] if len(turns) > 1 else 0
        if self.policy in ("sinks_and_recent", "importance") or (
            not first and self.window.fits(last + SINK_TOKENS, self.window.limit)
        ):
            first = max(first, min(SINK_TOKENS, rows))
        dropped = union(gone)
        if self.policy == "oldest_tokens":
            return self._oldest_tokens(rows, first, turns[-1] if len(turns) > 1 else rows - 1, dropped)
        if self.policy == "importance" and scores:
            return self._unimportant(rows, first, dropped, scores)
        if len(turns) > 1 and self.policy == "oldest":
            for start, stop in zip(turns, turns[1:], strict=False):
                if rows - count(dropped) <= self.most or stop > rows:
                    break
                dropped = union([*dropped, (max(start, first), max(stop, first))])
            return dropped
        recent = max(first, rows - max(self.most - first, 1))
        return union([*dropped, (first, recent)])

    def _oldest_tokens(self, rows: int, first: int, stop: int, gone: tuple[Rows, ...]) -> tuple[Rows, ...]:
        """Choose the oldest rows of [first, stop) that are left: a part of the window, as often as it takes until a prompt with
        the reserve for its reply fits (CachedAttention §3.4: the first 2K tokens of a window of 4K)."""
        part = self.window.limit - self.most
        beyond = rows - count(gone) - self.window.longest(self.window.limit)
        wanted, end = part * max(1, ceil(beyond / part)), first
        for start, last in complement(gone, stop):
            taken = min(wanted, max(0, last - max(start, first)))
            if taken:
                end, wanted = max(start, first) + taken, wanted - taken
        return union([*gone, (first, end)])

    def _unimportant(self, rows: int, first: int, gone: tuple[Rows, ...], scores: Sequence[float]) -> tuple[Rows, ...]:
        """Choose rows to leave out (H2O). The first rows stay; so do the most recent ones (half of the rows that
        remain, and rows without a score, which were never computed) and the others with the highest scores, of equals the
        older."""
        left = [row for start, stop in complement(gone, rows) for row in range(start, stop)]
        head = sum(row < first for row in left)
        room = max(self.most - head, 1)
        recent = min(room, max(self.most // 2, sum(row >= len(scores) for row in left)))
        rivals = left[head : max(head, len(left) - recent)]
        best = heapq.nsmallest(room - recent, rivals, key=lambda row: (-scores[row], row)) if room > recent else []
        chosen = frozenset(best)
        return union([*gone, *((row, row + 1) for row in rivals if row not in chosen)])


class Epochs:
    """All truncations that are remembered, by tenant and by the tokens they happened at."""

    def __init__(self) -> None:
        self._epochs: OrderedDict[str, Epoch] = OrderedDict()  # by salt, least recently used first
        self._lengths: dict[tuple[str, str], dict[int, dict[str, str]]] = {}  # tenant, head -> rows -> digest -> salt
        self._notes: dict[str, str | None] = {}
        self._ranges = 0  # dropped by all epochs

    def __len__(self) -> int:
        return len(self._epochs)

    def find(self, tenant: str, tokens: bytes) -> Epoch | None:
        """Find the latest truncation of the conversation with these tokens."""
        found = self.peek(tenant, tokens)
        if found is not None:
            self._epochs.move_to_end(found.salt)
        return found

    def peek(self, tenant: str, tokens: bytes) -> Epoch | None:
        """Find the latest truncation without counting a use."""
        best: Epoch | None = None
        for head in dict.fromkeys((head_of(tokens), "")):
            lengths = self._lengths.get((tenant, head), {})
            state, done = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
            for rows in sorted(rows for rows in lengths if 4 * rows <= len(tokens)):
                state.update(tokens[done : 4 * rows])  # one pass over the tokens, however many lengths there are
                done = 4 * rows
                salt = lengths[rows].get(state.copy().hexdigest())
                if salt is not None and (best is None or rows > best.rows):
                    best = self._epochs[salt]
        return best

    def add(self, epoch: Epoch, note: bool = True) -> None:
        """Remember a truncation. Another one at the same tokens is replaced."""
        key = (epoch.tenant, epoch.head)
        there = self._lengths.setdefault(key, {}).setdefault(epoch.rows, {})
        if epoch.digest in there:
            self._forget(there[epoch.digest])
            there = self._lengths.setdefault(key, {}).setdefault(epoch.rows, {})
        there[epoch.digest] = epoch.salt
        self._epochs[epoch.salt] = epoch
        self._ranges += len(epoch.dropped)
        if note:
            self._notes[epoch.salt] = epoch.packed()
        while len(self._epochs) > MAX_EPOCHS or (self._ranges > MAX_RANGES and len(self._epochs) > 1):
            self._forget(next(iter(self._epochs)))

    def forget_all(self, whose: str | None) -> None:
        """Forget truncations (see `covers`)."""
        for salt in [salt for salt in self._epochs if covers(whose, salt)]:
            self._forget(salt)

    def _forget(self, salt: str) -> None:
        epoch = self._epochs.pop(salt)
        self._ranges -= len(epoch.dropped)
        by_rows = self._lengths[epoch.tenant, epoch.head]
        del by_rows[epoch.rows][epoch.digest]
        if not by_rows[epoch.rows]:
            del by_rows[epoch.rows]
        if not by_rows:
            del self._lengths[epoch.tenant, epoch.head]
        self._notes[salt] = None

    def take_notes(self) -> list[tuple[str, str | None]]:
        """Return the notes that have changed since the last call, to be kept over restarts."""
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
    """Refuse a prompt that does not fit even when all that may be dropped is dropped.

    Raises:
        RequestError: it does not fit.
    """
    left = rows - count(rules.drop(rows, turns, ()))
    if not rules.window.fits(rows, max_tokens) and not rules.window.fits(left, max_tokens):
        raise rules.window.error(
            f"the prompt has {rows} tokens, and {left} remain when all that may be dropped is dropped: shorten the"
            " system prompt or the last message",
            "prompt",
        )


def refuse_discarding(discard: Sequence[Rows], rows: int, turns: Sequence[int], relative: bool) -> tuple[Rows, ...]:
    """Return the ranges of a token discarding list, sorted and apart.

    Raises:
        RequestError: see `ranges.checked`; or the model has learned positions, so that no row can be kept.
    """
    if not relative:
        raise RequestError(
            "this model has learned positions, so what remains could not be kept: send a shorter prompt instead",
            param="discard",
        )
    return checked(discard, rows, turns[0] if turns else 0)


@dataclass(frozen=True, slots=True)
class Cut:
    """A prompt that was cut: its tokens, the salt under which its rows lie, and where its first rows may come from. `head`: the rows
    before the first token that was left out, which its client's other prompts with these tokens have too.
    """

    prompt: bytes
    salt: str
    head: int
    dropped: int
    origin: Origin | None
    reason: Reason


def cut(
    epochs: Epochs,
    rules: Rules,
    tenant: str,
    tokens: bytes,
    max_tokens: int,
    turns: Sequence[int],
    relative: bool,
    discard: Sequence[Rows] = (),
    scores: Sequence[float] = (),
) -> Cut | None:
    """Cut a prompt if it does not fit, if there is something to `discard`, or if its conversation has been cut before;
    None if none of that.

    `relative`: can keys be embedded at new positions? Where positions were learned they cannot: the rest is then
    an ordinary prompt, and is recomputed. `scores`: of the first rows that earlier cuts have left (see `outgrown`).

    Raises:
        RequestError: even the last turn does not fit, or the list cannot be discarded.
    """
    rows = len(tokens) // 4
    before = epochs.find(tenant, tokens)
    gone = before.dropped if before is not None else ()
    dropped, reason = gone, before.reason if before is not None else rules.policy
    if discard:
        dropped = union([*gone, *refuse_discarding(discard, rows, turns, relative)])
        reason = "discard"
        checked(dropped, rows)
    fits = rules.window.fits(rows - count(dropped), max_tokens)
    if fits and dropped == gone:
        if before is None:
            return None
        salt = before.salt if relative else tenant
        return Cut(before.compact(tokens), salt, gone[0][0], count(gone), None, before.reason)
    if not fits:
        refuse_uncuttable(rules, rows, max_tokens, turns)
        dropped = rules.drop(rows, turns, dropped, _spread(scores, gone))
        reason = rules.policy if rules.policy != "importance" or scores else "sinks_and_recent"
    epoch = Epoch(tenant, rows, digest_of(tokens), dropped, reason, head_of(tokens))
    epochs.add(epoch)
    compact = epoch.compact(tokens)
    if not relative:
        return Cut(compact, tenant, dropped[0][0], count(dropped), None, reason)
    return Cut(compact, epoch.salt, dropped[0][0], count(dropped), _origin(before, epoch, tokens), reason)


def outgrown(
    epochs: Epochs, rules: Rules, tenant: str, tokens: bytes, max_tokens: int, relative: bool
) -> tuple[str, bytes] | None:
    """Of a prompt that `cut` would have to cut by importance: the salt and the tokens of the context that it goes on
    from, whose rows' scores are wanted. None for all others. Changes nothing."""
    if rules.policy != "importance":
        return None
    epoch = epochs.peek(tenant, tokens)
    compact = epoch.compact(tokens) if epoch is not None else tokens
    if rules.window.fits(len(compact) // 4, max_tokens):
        return None
    return (epoch.salt if epoch is not None and relative else tenant, compact)


def _spread(scores: Sequence[float], gone: Sequence[Rows]) -> list[float]:
    """Spread the scores of the rows that are left over all rows; the scores of dropped rows mean nothing."""
    found: list[float] = []
    taken = 0
    for start, stop in complement(gone, len(scores) + count(gone)):
        found += [0.0] * (start - len(found))
        found += scores[taken : taken + stop - start]
        taken += stop - start
    return found


def _origin(before: Epoch | None, epoch: Epoch, tokens: bytes) -> Origin:
    """The kept rows, in terms of what the conversation looked like just before. Without the last one, which is computed
    in any case."""
    kept = complement(epoch.dropped, len(tokens) // 4 - 1)
    if before is None:
        return Origin(epoch.tenant, tokens, kept)
    return Origin(before.salt, before.compact(tokens), union(_shifted(kept, before.dropped)))


def _shifted(kept: Sequence[Rows], gone: Sequence[Rows]) -> list[Rows]:
    """Renumber kept ranges for the context without the dropped rows; no dropped row lies within a kept range."""
    found, past, missing = [], 0, 0
    for start, stop in kept:
        while past < len(gone) and gone[past][0] < start:
            missing += gone[past][1] - gone[past][0]
            past += 1
        found.append((start - missing, stop - missing))
    return found
