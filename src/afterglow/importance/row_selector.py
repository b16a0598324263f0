"""Select the rows of a prefix that a layer attends to (SPEC §IV-B): the one routine, for prompts and for decoded tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from afterglow.importance.select import (
    Probes,
    Selection,
    SelectionRules,
    after_prompt,
    all_rows,
    all_sums,
    fall_back,
    judge,
    probe_sums,
)
from afterglow.importance.waits import Waits


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
        """`exact`: first rows of the prefix that are always selected (spec X8)."""
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
        exact = self.exact
        k = self.rules.keep(rows - exact)
        if k is None:
            return all_rows(rows, queries.q.device)
        sums = self.probe_sums(queries, (yield from probe_keys()))
        verdict = judge(sums[:, exact:], k, self.rules)
        found = verdict.selection
        if found is None:
            sums = self.all_sums(queries, (yield from all_keys()), sums)
            found = fall_back(sums[:, exact:], k, self.rules, verdict)
        return after_prompt(found, exact)

    def probe_sums(self, queries: Queries, keys: Tensor) -> Tensor:
        """Sum up the attention that each row gets from the queries of each voter: float32 [voters, rows]."""
        _, q, own_keys, scale, extra_lse = queries
        return probe_sums(self.probes, q, keys, own_keys, scale=scale, extra_lse=extra_lse)

    def all_sums(self, queries: Queries, keys: Tensor, voted: Tensor) -> Tensor:
        """Sum up the attention that each row gets in each KV head: float32 [kv_heads, rows]. `voted`: see `all_sums`."""
        _, q, own_keys, scale, extra_lse = queries
        return all_sums(self.probes, voted, q, keys, own_keys, scale=scale, extra_lse=extra_lse)
