"""Find out which rows are important, from the keys of a few probe heads where these agree (SPEC, IV-B).

`RowSelector`, the one routine for prompts and for decoded tokens, takes these steps for each layer of a request:

    most = rules.keep(rows)                               # None: all rows, nothing to select
    sums = probe_sums(probes, q, probe_keys, own_keys)    # attention that each row gets, by voter
    k = rules.enough(sums.mean(0), most)                  # fewer, where fewer rows hold the share `mass`
    verdict = judge(sums, k, rules)
    selection = verdict.selection                         # the probe heads agree: one set for all heads
    if selection is None:                                 # they disagree: all keys have to be loaded
        selection = fall_back(all_sums(...), k, rules, verdict)

Votes and sums are compared exactly; of equals the lower row goes first. So selections are equal on machines with
equal arithmetic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from afterglow.errors import ConfigError
from afterglow.importance.sums import group_sums
from afterglow.importance.waits import Waits
from afterglow.kernels.passes import suited

Kind = Literal["all", "shared", "per_head"]
"""`all`: every row; `shared`: one set for all heads; `per_head`: a set for each KV head."""
Fallback = Literal["per_head", "all"]
Force = Literal["no", "pass", "fallback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRules:
    """Set how much is kept, and how far probe heads must agree.

    `retention`: the share of rows that count as important. `mass`: the share of the attention with which a layer is content; where
    fewer rows hold it, fewer are kept (1: the share of rows alone, as in SPEC). `alpha`: the heads agree if their similarity exceeds (expected
    Jaccard index of random sets) ** alpha; with 0 they never do, with more they do sooner. `fallback`: what a layer keeps
    whose probe heads disagree, a set of rows for each KV head (H2O) or all rows. `force`: treat every layer as one that passes,
    or falls back (for measurements; heads of models with random weights never agree). `least`: of fewer rows all are kept.
    Raises: ConfigError, for values that make no sense.
    """

    retention: float = 0.25
    mass: float = 1.0
    probe_heads: int = 3
    alpha: float = 0.6
    fallback: Fallback = "per_head"
    force: Force = "no"
    least: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.retention <= 1:
            raise ConfigError(f"retention must be more than 0 and at most 1, got {self.retention:g}")
        if not 0 < self.mass <= 1:
            raise ConfigError(f"mass must be more than 0 and at most 1, got {self.mass:g}")
        if self.probe_heads < 1 or self.least < 0:
            raise ConfigError(
                f"one probe head or more, and 0 rows or more to select from, got {self.probe_heads} and {self.least}"
            )
        if not self.alpha >= 0:
            raise ConfigError(f"alpha must be 0 or more, got {self.alpha:g}; SPEC's default is 0.6")

    def keep(self, rows: int) -> int | None:
        """Compute how many of `rows` rows to select; None where all are kept without looking."""
        if rows == 0 or rows < self.least or self.retention >= 1:
            return None
        k = max(1, round(self.retention * rows))
        return None if k >= rows else k

    def enough(self, sums: Tensor, most: int) -> int:
        """Count the rows, `most` at most, that hold the share `mass` of the attention in the mean over heads, if each head keeps
        those that it gives most. `sums`: float32 [..., rows]."""
        if self.mass >= 1:
            return most
        held = sums.sort(-1, descending=True).values.cumsum(-1)
        held = held / held[..., -1:].clamp_min(torch.finfo(held.dtype).tiny)
        return min(int((held.view(-1, held.shape[-1]).mean(0) < self.mass).sum()) + 1, most)


@dataclass(frozen=True, slots=True)
class Probes:
    """Name the heads that vote.

    `voters`: the query heads of each vote: one, or a whole group, whose mean counts. `kv_heads`: the layer's first KV heads,
    whose keys the votes need and a sidecar holds.
    """

    heads: int
    all_kv_heads: int
    kv_heads: int
    voters: tuple[tuple[int, ...], ...]

    @property
    def group(self) -> int:
        """Count the query heads that read one KV head."""
        return self.heads // self.all_kv_heads

    @property
    def query_heads(self) -> int:
        """Count the query heads that read the probe keys: the first ones."""
        return self.kv_heads * self.group

    @property
    def by_group(self) -> bool:
        """Tell whether each probe KV head has one vote, that of the whole group."""
        return len(self.voters) == self.kv_heads and len(self.voters[0]) == self.group


def probes_of(heads: int, kv_heads: int, count: int = 3) -> Probes:
    """Choose the first `count` KV heads of a layer. With fewer KV heads the voters are single query heads, taken
    from all KV heads in turn; with fewer query heads, all heads vote."""
    group = heads // kv_heads
    if kv_heads >= count:
        voters = tuple(tuple(range(i * group, (i + 1) * group)) for i in range(count))
        return Probes(heads, kv_heads, count, voters)
    in_turn = [kv * group + i for i in range(group) for kv in range(kv_heads)]
    return Probes(heads, kv_heads, kv_heads, tuple((head,) for head in in_turn[:count]))


def probe_sums(
    probes: Probes, q: Tensor, keys: Tensor, own_keys: Tensor, *, scale: float, extra_lse: Tensor | None = None
) -> Tensor:
    """Compute the column sums of each voter, float32 [voters, rows]; a voter that is a group has the mean over the group.

    `q` [n, heads, head_dim] and `own_keys` [n, kv_heads, head_dim] of all heads, `keys` [rows, probes.kv_heads or more,
    head_dim]: only those of the probes are read. See `head_sums` for the rest.
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
    """Compute the column sums of all KV heads, float32 [kv_heads, rows], once all keys are there.

    `voted`: the result of `probe_sums`. KV heads whose whole groups have voted are not computed again.
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
    """Hold the rows of a prefix of `count` rows that a layer needs.

    `rows` int64, ascending: for all heads [k] (`shared`, `all`), or for each KV head [kv_heads, k] (`per_head`).
    `ranked` int64: rows that some head wants, the most important first: a guess for the next layer.
    `mean` float32 [count]: mean column sums over the heads that were looked at; None if no head was.
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
        """Count the rows that each head attends to."""
        return self.rows.shape[-1]

    def wanted(self) -> Tensor:
        """List the rows that any head wants, int64, ascending."""
        return self.rows if self.kind != "per_head" else self.ranked.sort().values

    def mask(self) -> Tensor:
        """Return `wanted` as a mask: bool [count]."""
        found = torch.zeros(self.count, dtype=torch.bool, device=self.rows.device)
        found[self.rows.flatten()] = True
        return found


def after_prompt(selection: Selection, first: int) -> Selection:
    """Turn a selection of the rows behind a prompt into one of all rows: the prompt's `first` rows are always selected."""
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
    """Hold the result of a vote. `selection`: None where the layer has to fall back to the keys of all heads."""

    similarity: float
    threshold: float
    selection: Selection | None


def all_rows(count: int, device: torch.device | str = "cpu") -> Selection:
    """Select all rows without looking at them."""
    rows = torch.arange(count, device=device)
    return Selection("all", count, rows, rows)


class Votes(NamedTuple):
    """Hold the k rows with the largest sums of each head, as a mask `sets`, bool [heads, rows], and as `rows`, int64 [heads, k],
    ascending. `mean` float32 [rows]: of all heads' sums. `ranked` int64: rows with votes, by votes, then by the larger mean, then
    the lower row."""

    sets: Tensor
    rows: Tensor
    mean: Tensor
    ranked: Tensor


def vote(sums: Tensor, k: int) -> Votes:
    """Let each head vote for its `k` rows (1 to rows) with the largest `sums`, float32 [heads, rows]. Of equals the lower row
    goes first."""
    if not 1 <= k <= sums.shape[1]:
        raise ValueError(f"the {k} largest of {sums.shape[1]}")
    mean = sums.mean(0)
    library = suited(sums)
    if library is None:
        sets = top(sums, k)
        return Votes(sets, sets.nonzero()[:, 1].view(-1, k), mean, _ranking(sets.sum(0), mean))
    sets = torch.empty(sums.shape, dtype=torch.bool)
    rows, ranked = torch.empty(len(sums), k, dtype=torch.int64), torch.empty(sums.shape[1], dtype=torch.int64)
    ballot = {
        "sums": sums.data_ptr(),
        "stride": sums.stride(0),
        "heads": sums.shape[0],
        "rows": sums.shape[1],
        "k": k,
        "mean": mean.data_ptr(),
        "mask": sets.data_ptr(),
        "places": rows.data_ptr(),
        "ranking": ranked.data_ptr(),
    }
    count = library.lib.afterglow_vote(library.new("afterglow_ballot *", ballot), torch.get_num_threads())
    if count < 0:
        raise MemoryError(f"no memory to rank {sums.shape[1]} rows")
    return Votes(sets, rows, mean, ranked[:count])


def top(sums: Tensor, k: int) -> Tensor:
    """Mark the k largest sums of each head: bool [..., rows]. Of equals the lower index goes first."""
    least = sums.topk(k, -1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = sums > least, sums == least
    room = k - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def similarity(sets: Tensor) -> float:
    """Compute the mean Jaccard index of all pairs of sets, given as masks [sets, rows]; 1 where there is no pair."""
    pairs = list(itertools.combinations(range(len(sets)), 2))
    if not pairs:
        return 1.0
    sizes = sets.sum(1).tolist()
    both = torch.stack([(sets[a] & sets[b]).sum() for a, b in pairs]).tolist()
    indices = [n / max(1, sizes[a] + sizes[b] - n) for n, (a, b) in zip(both, pairs, strict=True)]
    return math.fsum(indices) / len(pairs)


def threshold(k: int, rows: int, alpha: float) -> float:
    """Compute the similarity that heads must exceed: the expected Jaccard index of two random sets of k rows, to the
    power of `alpha`. (The expected index is a ratio of expectations, as in the paper.)"""
    return float((k / (2 * rows - k)) ** alpha)


def judge(sums: Tensor, k: int, rules: SelectionRules) -> Verdict:
    """Let the probe heads vote. `sums` float32 [voters, rows].

    Where the heads' sets are similar enough the selection is exactly k rows: by votes, then by mean column sum, then the lower
    row.
    """
    count, votes = sums.shape[1], vote(sums, k)
    alike, least = similarity(votes.sets), threshold(k, count, rules.alpha)
    passes = rules.force == "pass" or (rules.force == "no" and alike > least)
    if not passes:
        return Verdict(alike, least, None)
    ranked = votes.ranked[:k]
    return Verdict(alike, least, Selection("shared", count, ranked.sort().values, ranked, votes.mean, alike, least))


def fall_back(sums: Tensor, k: int, rules: SelectionRules, verdict: Verdict) -> Selection:
    """Select k rows for each KV head (H2O), or all rows. `sums` float32 [kv_heads, rows]."""
    count, votes = sums.shape[1], vote(sums, k)
    about = (votes.ranked, votes.mean, verdict.similarity, verdict.threshold)
    if rules.fallback == "all":
        return Selection("all", count, torch.arange(count, device=sums.device), *about)
    return Selection("per_head", count, votes.rows, *about)


def _ranking(votes: Tensor, mean: Tensor) -> Tensor:
    """Rank the rows with votes: by votes, then by mean column sum, then the lower row."""
    rows = votes.nonzero().squeeze(1)
    by_mean = mean[rows].sort(descending=True, stable=True).indices
    rows = rows[by_mean]
    return rows[votes[rows].sort(descending=True, stable=True).indices]


class Queries(NamedTuple):
    """Hold what asks for rows in one layer: new tokens' queries `q` [new, heads, head_dim] and their own keys [new or more,
    kv_heads, head_dim], positions applied. `extra_lse`: see `probe_sums`."""

    layer: int
    q: Tensor
    own_keys: Tensor
    scale: float
    extra_lse: Tensor | None = None


class RowSelector:
    """Let the probe heads vote, and fall back to all heads where they disagree."""

    def __init__(self, probes: Probes, rules: SelectionRules, exact: int = 0) -> None:
        """`exact`: first rows of the prefix that are always selected."""
        self.probes, self.rules, self.exact = probes, rules, exact

    def asks(self, rows: int) -> bool:
        """Tell whether the probe heads are asked about a prefix of `rows` rows. Else all its rows are selected."""
        return self.rules.keep(rows - self.exact) is not None

    def select(
        self,
        rows: int,
        queries: Queries,
        probe_keys: Callable[[], Waits[Tensor]],
        all_keys: Callable[[], Waits[Tensor]],
    ) -> Waits[Selection]:
        """Select from a prefix of `rows` rows.

        `probe_keys` loads the keys of the probe heads, [rows, probe heads or more, head_dim], and is not called where all
        rows are selected. `all_keys` loads the keys of all heads, and is called only where the probe heads disagree.
        """
        exact, rules = self.exact, self.rules
        most = rules.keep(rows - exact)
        if most is None:
            return all_rows(rows, queries.q.device)
        sums = self.probe_sums(queries, (yield from probe_keys()))
        verdict = judge(sums[:, exact:], rules.enough(sums[:, exact:].mean(0), most), rules)
        found = verdict.selection
        if found is None:
            sums = self.all_sums(queries, (yield from all_keys()), sums)
            found = fall_back(sums[:, exact:], rules.enough(sums[:, exact:], most), rules, verdict)
        return after_prompt(found, exact)

    def probe_sums(self, queries: Queries, keys: Tensor) -> Tensor:
        """Sum up the attention that each row gets from the queries of each voter: float32 [voters, rows]."""
        _, q, own_keys, scale, extra_lse = queries
        return probe_sums(self.probes, q, keys, own_keys, scale=scale, extra_lse=extra_lse)

    def all_sums(self, queries: Queries, keys: Tensor, voted: Tensor) -> Tensor:
        """Sum up the attention that each row gets in each KV head: float32 [kv_heads, rows]. `voted`: see `all_sums`."""
        _, q, own_keys, scale, extra_lse = queries
        return all_sums(self.probes, voted, q, keys, own_keys, scale=scale, extra_lse=extra_lse)
