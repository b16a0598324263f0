"""Remember the loaded rows of a prefix in one layer, so that the selection can be renewed while a request decodes.

SPEC decodes over the rows that the prompt selected. A fact that a reply retrieves is attended to by decoded tokens,
which took no part in that selection; so their queries may select anew. Rows that have been loaded before are taken from here,
and only the rest is read. No more than the prefix is held, as much as the plan counts for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from afterglow.importance.select import Selection

Pair = tuple[Tensor, Tensor]


class LoadedRows:
    """Hold rows of one layer by their place in the prefix, and dense copies of the rows that are attended to.

    `keys` (rotated) and `values` [rows, kv_heads, head_dim] are head-major in memory, and at first undefined; `known_keys` and
    `known_values`, bool [kv_heads, rows], mark the loaded rows. `kept`: the layer's keys and values, [k, kv_heads,
    head_dim] each: of KV head h, place i has row `_rows[h, i]` of the prefix, in no order. `whole`: the layer attends to all
    rows.
    """

    def __init__(self, rows: int, like: Tensor) -> None:
        """`rows`: of the prefix. `like` [., kv_heads, head_dim] has their shape."""
        kv_heads, head_dim = like.shape[1:]
        self.keys: Tensor = like.new_empty(kv_heads, rows, head_dim).transpose(0, 1)
        self.values = torch.empty_like(self.keys)
        self.known_keys = torch.zeros(kv_heads, rows, dtype=torch.bool, device=like.device)
        self.known_values = torch.zeros_like(self.known_keys)
        self.ever = torch.zeros(rows, dtype=torch.bool, device=like.device)  # rows that some head has attended to
        self.kept: Pair = (self.keys[:0], self.values[:0])
        self.whole = False
        self._rows = torch.empty(kv_heads, 0, dtype=torch.int64, device=like.device)

    def begin(self, selection: Selection, kept: Pair) -> None:
        """Take in the first selection, with its rows [k, kv_heads, head_dim] in the order of `selection.rows`."""
        keys, values = (_heads_first(rows) for rows in kept)
        self.kept, self._rows = (keys, values), self._of_heads(selection)
        rows, heads = self._places()
        self.keys[rows, heads], self.values[rows, heads] = keys, values
        self.known_keys.scatter_(1, self._rows, True)
        self.known_values.scatter_(1, self._rows, True)
        self.ever |= self._mask().any(0)

    def put_keys(self, rows: Tensor | slice, keys: Tensor) -> None:
        """Store rotated keys [rows, heads, head_dim] of the first `heads` KV heads."""
        heads = slice(keys.shape[1])
        self.keys[rows, heads] = keys
        self.known_keys[heads, rows] = True

    def put_values(self, rows: Tensor, values: Tensor) -> None:
        """Store values [rows, kv_heads, head_dim]."""
        self.values[rows] = values
        self.known_values[:, rows] = True

    def without_keys(self, rows: Tensor | None = None) -> Tensor:
        """List those of `rows` (None: all rows) whose keys are missing for some head: int64, ascending."""
        return _lacking(self.known_keys, rows)

    def without_values(self, rows: Tensor) -> Tensor:
        """List those of `rows` whose values are missing for some head: int64, ascending."""
        return _lacking(self.known_values, rows)

    def renew(self, selection: Selection) -> None:
        """Attend to another selection, whose rows have all been loaded. Of as many rows as before, only those are copied that the
        last one did not have."""
        if selection.kind == "all":
            self.whole = True
            self.ever[:] = True
            return
        wanted = torch.zeros_like(self.known_keys).scatter_(1, self._of_heads(selection), True)
        if selection.kept != self._rows.shape[1]:
            self._rows = self._of_heads(selection)
            rows, heads = self._places()
            self.kept = (_heads_first(self.keys[rows, heads]), _heads_first(self.values[rows, heads]))
            self.ever |= wanted.any(0)
            return
        heads, places = (~wanted.gather(1, self._rows)).nonzero(as_tuple=True)
        # As many come as leave, for each head: both are listed by head.
        _, rows = (wanted & ~self._mask()).nonzero(as_tuple=True)
        keys, values = self.kept
        keys[places, heads], values[places, heads] = self.keys[rows, heads], self.values[rows, heads]
        self._rows[heads, places] = rows
        self.ever[rows] = True

    def _places(self) -> Pair:
        """Return the rows that are attended to now, int64 [k, kv_heads], and their heads [kv_heads]: places in `keys`."""
        return self._rows.T, torch.arange(len(self._rows), device=self._rows.device)

    def _mask(self) -> Tensor:
        """Mark the rows that are attended to now: bool [kv_heads, rows]."""
        return torch.zeros_like(self.known_keys).scatter_(1, self._rows, True)

    def _of_heads(self, selection: Selection) -> Tensor:
        """Copy a selection's rows for each KV head: int64 [kv_heads, k]."""
        rows = selection.rows
        return rows.expand(len(self.known_keys), -1).clone() if rows.ndim == 1 else rows.clone()


def _heads_first(rows: Tensor) -> Tensor:
    """Copy [rows, kv_heads, head_dim] so that decoding reads it fast (see `kernels.attention`): heads first in memory."""
    return rows.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)


def _lacking(known: Tensor, rows: Tensor | None) -> Tensor:
    if rows is None:
        return (~known.all(0)).nonzero().squeeze(1)
    return rows[~known[:, rows].all(0)]
