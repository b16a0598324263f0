"""New rows of a step on CUDA: rotated and put into their contexts in one launch for a layer, whatever the batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from afterglow.kernels.context_pages import Pages
from afterglow.kernels.gate import Gate
from afterglow.kernels.paged_parts import RowPlaces, row_places, suited
from afterglow.kernels.rope import Rotation

_gate = Gate("triton_rows")


class DeviceRows:
    """Where the new rows of a step go, in the order of the batch. Without one, the table is made at the first layer."""

    def __init__(self, runs: Sequence[tuple[Pages, int, int]] | RowPlaces) -> None:
        """Take rows [start, stop) of contexts whose pages have one shape, or where they are."""
        self._runs = runs
        self._places = runs if isinstance(runs, RowPlaces) else None
        self._data = runs.base if isinstance(runs, RowPlaces) else runs[0][0].data

    def place(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor | None:
        """Rotate `q` [rows, heads, head_dim] and `k` [rows, kv_heads, head_dim], put keys and `v` into the contexts, and return
        the rotated queries; or do nothing and return None: torch must do it."""
        heads, head_dim = q.shape[1:]
        data = self._data
        kinds = {x.dtype for x in (q, k, v, data)}
        if len(kinds) > 1 or not suited(q.dtype, head_dim, 1) or any(x.stride(2) != 1 for x in (q, k, v)):
            return None
        if self._places is None:
            assert not isinstance(self._runs, RowPlaces)
            self._places = row_places(self._runs)
        places = self._places
        rotary = 0 if rotation is None else rotation[0].shape[1]
        kind = data.device, q.dtype, head_dim, heads, k.shape[1], rotary
        return _gate.run(lambda kernels: kernels.place(places, layer, q, k, v, rotation), *kind)
