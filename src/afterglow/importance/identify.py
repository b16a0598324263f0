"""Which rows are important, from the keys of a few probe heads where those agree (SPEC, IV-B; spec S2-S7, S18).

For each layer of a request:

    k = rules.keep(rows)                                  # None: load everything, nothing to select
    sums = probe_sums(probes, q, probe_keys, own_keys)    # attention that each row gets, by probe head
    verdict = judge(sums, k, rules)
    selection = verdict.selection                         # the probe heads agree: one set for all heads
    if selection is None:                                 # they do not: all keys have to be loaded
        selection = fall_back(all_sums(...), kv_heads, k, rules, verdict)

Votes and sums are compared exactly; of equals the lower row goes first, so a selection is the same on every machine
whose arithmetic is.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from afterglow.errors import ConfigError
from afterglow.importance.accounting import Kind
from afterglow.importance.sums import group_sums
from afterglow.kernels.passes import suited

Fallback = Literal["per_head", "all"]
Force = Literal["no", "pass", "fallback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How much is kept, and when probe heads are believed. Errors: ConfigError for values that make no sense.

    `retention`: the share of rows that count as important. `alpha`: the threshold is (expected Jaccard index of random
    sets) ** alpha: 0 believes nobody, more believes sooner. `fallback`: what a layer keeps whose probe heads disagree, a
    set for each KV head (H2O), or all rows. `force`: take every layer for one that passes, or falls back (for
    measurements; models of random weights never agree). Of fewer than `least` rows all are kept.
    """

    retention: float = 0.25
    probe_heads: int = 3
    alpha: float = 0.6
    fallback: Fallback = "per_head"
    force: Force = "no"
    least: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.retention <= 1:
            raise ConfigError(f"retention must be more than 0 and at most 1, got {self.retention:g}")
        if self.probe_heads < 1 or self.least < 0:
            raise ConfigError(
                f"one probe head or more, and 0 rows or more to select from, got {self.probe_heads} and {self.least}"
            )
        if not self.alpha >= 0:
            raise ConfigError(f"alpha must be 0 or more, got {self.alpha:g}; SPEC's default is 0.6")

    def keep(self, rows: int) -> int | None:
        """How many of `rows` are important; None where all are kept without looking (spec S1)."""
        if rows == 0 or rows < self.least or self.retention >= 1:
            return None
        k = max(1, round(self.retention * rows))
        return None if k >= rows else k


@dataclass(frozen=True, slots=True)
class Probes:
    """Who votes. `voters`: query heads, one or (a whole group, whose mean counts) several for each vote; `kv_heads`: whose
    keys that takes, the first so many of the layer: what a sidecar holds."""

    heads: int
    all_kv_heads: int
    kv_heads: int
    voters: tuple[tuple[int, ...], ...]

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.heads // self.all_kv_heads

    @property
    def query_heads(self) -> int:
        """The first so many query heads read the probe keys."""
        return self.kv_heads * self.group

    @property
    def by_group(self) -> bool:
        """Whether each probe KV head has one vote, that of its whole group."""
        return len(self.voters) == self.kv_heads and len(self.voters[0]) == self.group


def probes_of(heads: int, kv_heads: int, count: int = 3) -> Probes:
    """The first `count` KV heads of a layer (spec S3, S18). With fewer KV heads than that the voters are single query
    heads, taken from all KV heads in turn; with fewer heads than that, all of them."""
    group = heads // kv_heads
    if kv_heads >= count:
        voters = tuple(tuple(range(i * group, (i + 1) * group)) for i in range(count))
        return Probes(heads, kv_heads, count, voters)
    in_turn = [kv * group + i for i in range(group) for kv in range(kv_heads)]
    return Probes(heads, kv_heads, kv_heads, tuple((head,) for head in in_turn[:count]))


def probe_sums(
    probes: Probes, q: Tensor, keys: Tensor, own_keys: Tensor, *, scale: float, extra_lse: Tensor | None = None
) -> Tensor:
    """Column sums of each voter, float32 [voters, rows]; a voter that is a group has its heads' mean.

    `q` [n, heads, head_dim] and `own_keys` [n, kv_heads, head_dim] of all heads, `keys` [rows, probes.kv_heads or more,
    head_dim]: only the probes' are read. See `column_sums` for the rest.
    """
    if probes.by_group:
        used, kv = probes.query_heads, slice(probes.kv_heads)
        lse = None if extra_lse is None else extra_lse[:, :used]
        return group_sums(q[:, :used], keys[:, kv], own_keys[:, kv], scale=scale, extra_lse=lse)
    found = []
    for (head,) in probes.voters:
        own = slice(head, head + 1)
        kv = slice(head // probes.group, head // probes.group + 1)
        lse = None if extra_lse is None else extra_lse[:, own]
        found.append(group_sums(q[:, own], keys[:, kv], own_keys[:, kv], scale=scale, extra_lse=lse))
    return torch.cat(found)


def all_sums(
    probes: Probes,
    voted: Tensor,
    q: Tensor,
    keys: Tensor,
    own_keys: Tensor,
    *,
    scale: float,
    extra_lse: Tensor | None = None,
) -> Tensor:
    """Column sums of all KV heads, float32 [kv_heads, rows], once all keys are there.

    `voted` is what `probe_sums` found; KV heads that it speaks for as a whole are not computed again.
    """
    done = probes.kv_heads if probes.by_group else 0
    if done == probes.all_kv_heads:
        return voted
    used = done * probes.group
    lse = None if extra_lse is None else extra_lse[:, used:]
    rest = group_sums(q[:, used:], keys[:, done:], own_keys[:, done:], scale=scale, extra_lse=lse)
    return torch.cat((voted, rest)) if done else rest


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """What a layer needs of the prefix.

    `rows` int64, ascending: of all heads [k] (`shared`, `all`), or of each KV head [kv_heads, k] (`per_head`).
    `ranked` int64: rows that some head wants, the most important first (spec S6, S11): a guess for the next layer.
    `mean` float32 [count]: mean column sums over the heads that were looked at; None where none was.
    """

    kind: Kind
    count: int
    rows: Tensor
    ranked: Tensor
    mean: Tensor | None = None
    similarity: float | None = None
    threshold: float | None = None

    @property
    def kept(self) -> int:
        """Rows that each head attends to."""
        return self.rows.shape[-1]

    def wanted(self) -> Tensor:
        """Rows that any head wants, int64, ascending."""
        return self.rows if self.kind != "per_head" else self.ranked.sort().values

    def mask(self) -> Tensor:
        """bool [count]: `wanted` as a mask."""
        found = torch.zeros(self.count, dtype=torch.bool, device=self.rows.device)
        found[self.rows.flatten()] = True
        return found


def behind(selection: Selection, first: int) -> Selection:
    """A selection of the rows behind a prompt of `first` rows that is always attended to, as one of all of them (spec X8)."""
    if not first:
        return selection
    prompt = torch.arange(first, device=selection.rows.device)
    rows = selection.rows + first
    whole = prompt if rows.ndim == 1 else prompt.expand(len(rows), -1)
    mean = selection.mean
    if mean is not None:
        mean = torch.cat((mean.mean().expand(first), mean))
    return replace(
        selection,
        count=selection.count + first,
        rows=torch.cat((whole, rows), -1),
        ranked=torch.cat((prompt, selection.ranked + first)),
        mean=mean,
    )


class Verdict(NamedTuple):
    """What the probe heads say. `selection` is None where the layer has to fall back to all heads' keys."""

    similarity: float
    threshold: float
    selection: Selection | None


def everything(count: int, device: torch.device | str = "cpu") -> Selection:
    """All rows, not looked at."""
    rows = torch.arange(count, device=device)
    return Selection("all", count, rows, rows)


class Votes(NamedTuple):
    """What heads find important: of each the k rows with the largest sums, as a mask, bool [heads, rows], and as rows, int64
    [heads, k], ascending. `ranked` int64: all that have a vote, those with the most first, then those with the larger `mean`
    (float32 [rows], of all heads' sums), then the lower one."""

    sets: Tensor
    rows: Tensor
    mean: Tensor
    ranked: Tensor


def vote(sums: Tensor, k: int) -> Votes:
    """`sums` float32 [heads, rows], of each head its `k` (1 to rows). Of equals the lower row goes first."""
    if not 1 <= k <= sums.shape[1]:
        raise ValueError(f"the {k} largest of {sums.shape[1]}")
    mean = sums.mean(0)
    library = suited(sums)
    if library is None:
        sets = top(sums, k)
        return Votes(sets, sets.nonzero()[:, 1].view(-1, k), mean, _ranking(sets.sum(0), mean))
    sets = torch.empty(sums.shape, dtype=torch.bool)
    rows, ranked = torch.empty(len(sums), k, dtype=torch.int64), torch.empty(sums.shape[1], dtype=torch.int64)
    count = library.afterglow_vote_3(
        *(sums.data_ptr(), sums.stride(0), *sums.shape, k, mean.data_ptr()),
        *(sets.data_ptr(), rows.data_ptr(), ranked.data_ptr(), torch.get_num_threads()),
    )
    if count < 0:
        raise MemoryError(f"no memory to rank {sums.shape[1]} rows")
    return Votes(sets, rows, mean, ranked[:count])


def top(sums: Tensor, k: int) -> Tensor:
    """The k largest of each row, as a mask: bool of the shape [..., rows]. Of equals the lower index goes first."""
    least = sums.topk(k, -1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = sums > least, sums == least
    room = k - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def similarity(sets: Tensor) -> float:
    """Mean Jaccard index of all pairs of sets, given as masks [sets, rows] (spec S4); 1 where there is no pair."""
    pairs = list(itertools.combinations(range(len(sets)), 2))
    if not pairs:
        return 1.0
    sizes = sets.sum(1).tolist()
    both = torch.stack([(sets[a] & sets[b]).sum() for a, b in pairs]).tolist()
    indices = [n / max(1, sizes[a] + sizes[b] - n) for n, (a, b) in zip(both, pairs, strict=True)]
    return math.fsum(indices) / len(pairs)


def threshold(k: int, rows: int, alpha: float) -> float:
    """What the similarity has to exceed (spec S5): the expected Jaccard index of two random sets of k, to the power of
    `alpha`. (A ratio of expectations, as the paper has it.)"""
    return float((k / (2 * rows - k)) ** alpha)


def judge(sums: Tensor, k: int, rules: Rules) -> Verdict:
    """Let the probe heads vote (spec S4-S6). `sums` float32 [voters, rows].

    Where their sets are similar enough the selection is exactly k rows: by votes, then mean column sum, then the lower
    index.
    """
    count, votes = sums.shape[1], vote(sums, k)
    alike, least = similarity(votes.sets), threshold(k, count, rules.alpha)
    passes = rules.force == "pass" or (rules.force == "no" and alike > least)
    if not passes:
        return Verdict(alike, least, None)
    ranked = votes.ranked[:k]
    return Verdict(alike, least, Selection("shared", count, ranked.sort().values, ranked, votes.mean, alike, least))


def fall_back(sums: Tensor, k: int, rules: Rules, verdict: Verdict) -> Selection:
    """A set of k rows for each KV head (H2O; spec S7), or all rows. `sums` float32 [kv_heads, rows]."""
    count, votes = sums.shape[1], vote(sums, k)
    about = (votes.ranked, votes.mean, verdict.similarity, verdict.threshold)
    if rules.fallback == "all":
        return Selection("all", count, torch.arange(count, device=sums.device), *about)
    return Selection("per_head", count, votes.rows, *about)


def _ranking(votes: Tensor, mean: Tensor) -> Tensor:
    """Rows with votes, by votes, then mean column sum, then the lower index."""
    rows = votes.nonzero().squeeze(1)
    by_mean = mean[rows].sort(descending=True, stable=True).indices
    rows = rows[by_mean]
    return rows[votes[rows].sort(descending=True, stable=True).indices]
