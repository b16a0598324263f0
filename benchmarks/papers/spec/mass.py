"""Another way to say how many rows a layer keeps: as many as get a share of the attention, not a share of the rows."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from afterglow.importance.select import Probes, Queries, RowSelector, Selection, SelectionRules, fall_back, judge
from afterglow.importance.waits import Waits

FEWEST = 8  # rows


class MassSelector(RowSelector):
    """Let each layer keep the fewest rows that get the share `mass` of what the probe heads' queries give to all rows."""

    def __init__(self, probes: Probes, rules: SelectionRules, mass: float) -> None:
        super().__init__(probes, rules)
        self.mass = mass

    def select(
        self,
        rows: int,
        queries: Queries,
        probe_keys: Callable[[], Waits[Tensor]],
        all_keys: Callable[[], Waits[Tensor]],
    ) -> Waits[Selection]:
        sums = self.probe_sums(queries, (yield from probe_keys()))
        k = min(max(fewest(sums, self.mass), FEWEST), rows)
        verdict = judge(sums, k, self.rules)
        if verdict.selection is not None:
            return verdict.selection
        return fall_back(self.all_sums(queries, (yield from all_keys()), sums), k, self.rules, verdict)


def fewest(sums: Tensor, mass: float) -> int:
    """Count the fewest rows that get the share `mass` of what all rows of `sums`, float32 [heads, rows], get in the mean."""
    ordered = sums.mean(0).sort(descending=True).values.cumsum(0)
    return min(int((ordered < mass * ordered[-1]).sum()) + 1, len(ordered))
