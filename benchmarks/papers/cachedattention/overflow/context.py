"""A context on the decoder itself, and each variant's treatment when the context window overflows.

Keys are kept un-rotated, one position to each row; so the variants differ in nothing but which rows they keep and
which positions those get:

- CA (CachedAttention §3.4): the surviving rows, embedded anew at 0..m-1; new tokens go on at m.
- TT (token truncation): the surviving *tokens*, computed anew. OF (overflow invalidates the cache) computes the very
  same, only not at every turn: see `Prefill`.
- NKVT (naive KV truncation): the surviving rows at the positions they had; new tokens still get m, m+1, ...
- none: the head alone, nothing of the history. The floor: what the surviving history is worth at all.
- sinks_and_recent, importance: as many rows as in CA, but chosen by these policies of the server: the very
  choice of `afterglow.plan.prefix.truncation`, and scores as the engine records them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.choices import TruncationPolicy
from afterglow.kernels.attention import attend, merge
from afterglow.kernels.column_sums import column_sums
from afterglow.model.decoder import Attention, Decoder
from afterglow.plan.prefix.ranges import complement
from afterglow.plan.prefix.truncation import Rules
from afterglow.request import ContextWindow

POLICIES: tuple[TruncationPolicy, ...] = ("sinks_and_recent", "importance")
VARIANTS = ("CA", "TT", "NKVT", "none", *POLICIES)


class Context:
    """Un-rotated keys, values and positions of one sequence, all layers. `scores` [rows]: the attention that each row
    got so far, if that is recorded."""

    def __init__(self, decoder: Decoder, scored: bool = False) -> None:
        """An empty context. Raises: ValueError for learned positions: their keys cannot be embedded anew."""
        spec = decoder.spec
        if not spec.decoupled:
            raise ValueError(f"{spec.family} has learned positions: truncation means to compute everything anew")
        self.decoder = decoder
        nothing = torch.empty(0, spec.kv_heads, spec.head_dim, dtype=decoder.dtype, device=decoder.device)
        self.keys = [nothing] * spec.layers
        self.values = [nothing] * spec.layers
        self.positions = torch.empty(0, dtype=torch.int64, device=decoder.device)
        self.scores = torch.empty(0, device=decoder.device) if scored else None

    def __len__(self) -> int:
        return self.positions.shape[0]

    def fork(self, scored: bool = False) -> Context:
        """A second context of the same rows; tensors are shared, as nothing ever writes into them."""
        other = Context(self.decoder)
        other.scores = self.scores if scored else None
        other.keys, other.values, other.positions = list(self.keys), list(self.values), self.positions
        return other

    def keep(self, rows: Tensor, positions: Tensor) -> None:
        """Keep `rows` (int64, ascending), at `positions` from now on."""
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]
        self.positions = positions
        if self.scores is not None:
            self.scores = self.scores[rows]

    def extend(self, ids: Sequence[int]) -> Tensor:
        """Append tokens at positions len(self), ...; their final hidden rows [tokens, hidden]."""
        return self._forward([ids], keep=True)

    def branches(self, parts: Sequence[Sequence[int]]) -> Tensor:
        """Final hidden rows of several continuations, one after the other; none sees another, none is kept."""
        return self._forward(parts, keep=False)

    def _forward(self, parts: Sequence[Sequence[int]], keep: bool) -> Tensor:
        device, rows = self.decoder.device, len(self)
        ids = torch.tensor([token for part in parts for token in part], dtype=torch.int64, device=device)
        positions = torch.cat([torch.arange(rows, rows + len(part), device=device) for part in parts])
        over = _Over(self, positions, [len(part) for part in parts])
        hidden = self.decoder.forward(ids, positions, over)
        if keep:
            self.keys = [torch.cat(pair) for pair in zip(self.keys, over.keys, strict=True)]
            self.values = [torch.cat(pair) for pair in zip(self.values, over.values, strict=True)]
            self.positions = torch.cat((self.positions, positions))
            if self.scores is not None:
                self.scores = F.pad(self.scores, (0, len(positions))) + over.sums
        return hidden


class _Over:
    """`Attend` of new rows over a context and over themselves; collects the new keys and values, un-rotated."""

    def __init__(self, context: Context, positions: Tensor, lengths: list[int]) -> None:
        self._context, self._lengths = context, lengths
        self._past = context.decoder.rotation(context.positions)
        self._new = context.decoder.rotation(positions)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.sums: Tensor | float = 0.0  # attention that all rows got; where one part alone is computed

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.project(x)
        self.keys.append(k)
        self.values.append(v)
        past = attention.rotate(self._context.keys[layer], self._past)
        q, k = attention.rotate(q, self._new), attention.rotate(k, self._new)
        own = [
            attend(*part, scale=attention.scale, causal=True)
            for part in zip(*(torch.split(t, self._lengths) for t in (q, k, v)), strict=True)
        ]
        before = attend(q, past, self._context.values[layer], scale=attention.scale, causal=False)
        outs, sums = zip(*own, strict=True)
        out, lse = merge((before, (torch.cat(outs), torch.cat(sums))))
        if self._context.scores is not None and len(self._lengths) == 1:
            self.sums = self.sums + column_sums(q, torch.cat((past, k)), lse, scale=attention.scale)
        return out.flatten(1)


@dataclass(slots=True)
class Prefill:
    """Tokens that a server would prefill from the first overflow on; replies are decoded, and count only when they
    are computed again."""

    turns: int = 0
    new: int = 0  # prompts alone: CA and NKVT
    at_overflow: int = 0  # survivors, once for each overflow: what OF adds
    at_every_turn: int = 0  # the whole history, turn by turn: what TT (no KV kept) adds

    def add(self, other: Prefill) -> None:
        """Sum up over sessions."""
        self.turns += other.turns
        self.new += other.new
        self.at_overflow += other.at_overflow
        self.at_every_turn += other.at_every_turn

    def by_variant(self) -> dict[str, int]:
        """Prefilled tokens of each variant. `none` computes no history because it has none."""
        return {
            "CA": self.new,
            "TT": self.new + self.at_every_turn,
            "OF": self.new + self.at_overflow,
            "NKVT": self.new,
            "none": self.new,
            **dict.fromkeys(POLICIES, self.new),
        }


@dataclass
class Session:
    """One conversation that outgrows its window, in all variants at once; they share what comes before the overflow.

    Overflow (CachedAttention §3.4): history and turn together exceed `window`; then the oldest ceil(ratio * window)
    tokens go, never those of `head` (BOS, system prompt), until the turn fits. With `whole_turns` the cut moves on
    to the next end of a turn.
    """

    decoder: Decoder
    head: Sequence[int]
    window: int
    ratio: float = 0.5
    whole_turns: bool = False
    variants: Sequence[str] = VARIANTS
    contexts: dict[str, Context] = field(init=False)
    before: Context | None = field(default=None, init=False)  # CA's, as it was before the last truncation
    overflows: int = field(default=0, init=False)
    prefill: Prefill = field(default_factory=Prefill, init=False)
    first: int = field(init=False)  # index in the whole stream of the first token after the head that is left

    def __post_init__(self) -> None:
        self._ids = list(self.head)
        self._ends: list[int] = []  # of turns, counted in the whole stream
        self.first = len(self.head)
        self._shared = Context(self.decoder, scored="importance" in self.variants)
        self.contexts = dict.fromkeys(self.variants, self._shared)
        if self._ids:
            self._shared.extend(self._ids)

    @property
    def length(self) -> int:
        """Tokens of the whole stream so far, head and dropped ones included."""
        return self.first + len(self._ids) - len(self.head)

    def first_after(self, need: int) -> int:
        """What `first` will be once a turn of `need` tokens was added."""
        head, first, end = len(self.head), self.first, self.length
        if head + need > self.window:
            raise ValueError(f"a turn of {need} tokens does not fit a window of {self.window}")
        while head + (end - first) + need > self.window:
            first = min(end, first + math.ceil(self.ratio * self.window))
            if self.whole_turns:
                first = next(stop for stop in self._ends if stop >= first)
        return first

    def add(self, prompt: Sequence[int], reply: Sequence[int] = ()) -> dict[str, Tensor]:
        """Append a turn, after truncation where it does not fit.

        Returns, from the first overflow on, each variant's negative log-likelihood of the turn's tokens but the
        first, float32 [tokens - 1]; before it, nothing.
        """
        turn = [*prompt, *reply]
        first = self.first_after(len(turn))
        if first > self.first:
            self._truncate(first)
        found: dict[str, Tensor] = {}
        if self.overflows:
            self.prefill.turns += 1
            self.prefill.new += len(prompt)
            self.prefill.at_every_turn += len(self._ids)
            for name, context in self.contexts.items():
                found[name] = self._losses(context.extend(turn), turn)
        else:
            self._shared.extend(turn)
        self._ids += turn
        self._ends.append(self.length)
        return found

    def _losses(self, hidden: Tensor, turn: Sequence[int]) -> Tensor:
        targets = torch.tensor(turn[1:], device=hidden.device)
        return F.cross_entropy(self.decoder.logits(hidden[:-1]), targets, reduction="none").cpu()

    def _truncate(self, first: int) -> None:
        if not self.overflows:
            self.contexts = {name: self._shared.fork(scored=name == "importance") for name in self.variants}
        self.before = self.contexts["CA"].fork() if "CA" in self.contexts else None
        head, dropped = len(self.head), first - self.first
        rows = torch.tensor([*range(head), *range(head + dropped, len(self._ids))], device=self.decoder.device)
        del self._ids[head : head + dropped]
        self.first = first
        self.overflows += 1
        self.prefill.at_overflow += len(self._ids)
        for name, context in self.contexts.items():
            truncate(context, name, self._ids, rows, head)


def truncate(context: Context, variant: str, ids: Sequence[int], rows: Tensor, head: int) -> None:
    """Leave the surviving `rows` of a context, whose tokens are `ids`, in the way of `variant`."""
    if variant == "CA":
        context.keep(rows, torch.arange(len(rows), device=rows.device))
    elif variant == "NKVT":
        context.keep(rows, context.positions[rows])
    elif variant == "TT":
        context.keep(rows[:0], rows[:0])
        if ids:
            context.extend(ids)
    elif variant == "none":
        context.keep(rows[:head], rows[:head])
    else:
        policy = next((policy for policy in POLICIES if policy == variant), None)
        if policy is None:
            raise ValueError(f"no variant {variant!r}; there are {', '.join(VARIANTS)}")
        left = chosen(context, policy, len(rows), head)
        context.keep(left, torch.arange(len(left), device=left.device))


def chosen(context: Context, policy: TruncationPolicy, count: int, head: int) -> Tensor:
    """The rows that a policy of the server leaves of a context, `count` in all."""
    scores = context.scores.tolist() if context.scores is not None else ()
    dropped = Rules(ContextWindow(2 * count), 0.5, policy).drop(len(context), (head,), (), scores)
    left = [row for start, stop in complement(dropped, len(context)) for row in range(start, stop)]
    return torch.tensor(left, device=context.positions.device)
