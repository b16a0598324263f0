"""Where modules of transformers meet our attention: a cache that keeps nothing, and an attention function.

A module projects, norms and rotates as it always does, hands its keys and values to the cache, and calls the attention function.
That one takes the rotation back, if it can be taken back, and calls an `Attend`, which rotates again: so rows are stored
without positions, as those of other models are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from afterglow.errors import ModelError
from afterglow.kernels.rope import RopeTable, Rotation, rotate
from afterglow.model.decoder import Attend, Attention
from afterglow.model.linear import Linear
from afterglow.model.spec import ModelSpec

ATTENTION = "afterglow"
# Keywords of the attention function that say nothing about the arithmetic of attention.
HARMLESS = frozenset(
    ("position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "cache_position")
)


class Projected(Linear):
    """What stands for the fused projections of a layer whose module has projected already: rows go through."""

    def __init__(self, outputs: int, first: int = 0) -> None:
        """Hand on `outputs` numbers of each row, from `first` on."""
        self.inputs = self.outputs = outputs
        self._first = first

    def __call__(self, x: Tensor) -> Tensor:
        return x[:, self._first : self._first + self.outputs]

    def rows(self, start: int, stop: int) -> Projected:
        return Projected(stop - start, self._first + start)


@dataclass(frozen=True, slots=True)
class Turning:
    """How a model's modules turn queries and keys. `table`: None if keys are kept as they are. `order`, int64 [head_dim]: where the
    dimensions of a head lie in the modules' heads, in the order of the table; None: there."""

    table: RopeTable | None = None
    order: Tensor | None = None

    def inverse(self, positions: Tensor) -> Rotation | None:
        """Return what takes the rotation to `positions`, int64 [rows], back."""
        if self.table is None:
            return None
        cos, sin = self.table.cos_sin(positions)
        squared = self.table.attention_factor**2
        return cos / squared, -sin / squared


class HandingCache(Cache):  # type: ignore[misc]
    """The cache that a model's modules see. It keeps nothing: keys and values go to the `Attend` of the pass."""

    def __init__(self, spec: ModelSpec, turning: Turning) -> None:
        """Hand rows of a model of this shape. `spec.unturned`: layers that do not turn."""
        super().__init__(layers=[])
        self._turning, self._unturned = turning, frozenset(spec.unturned)
        width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self._heads = (spec.heads, spec.kv_heads, spec.head_dim)
        self._attentions = [Attention(layer, spec, Projected(width)) for layer in range(spec.layers)]
        self.windows: dict[int, int] = {}  # by layer: what modules asked for
        self._attend: Attend | None = None
        self._inverse: Rotation | None = None
        self._handed: tuple[int, Tensor, Tensor] | None = None
        self.layers_done = 0

    @contextlib.contextmanager
    def passing(self, positions: Tensor, attend: Attend) -> Iterator[None]:
        """Hand the rows of a pass, at `positions`, int64 [rows], to `attend`, and keep nothing of it afterwards."""
        self._attend, self._inverse, self.layers_done = attend, self._turning.inverse(positions), 0
        try:
            yield
        finally:
            self._attend = self._inverse = self._handed = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Note what a module hands: keys and values [1, kv_heads, rows, head_dim], and hand them back."""
        self._handed = layer_idx, key_states, value_states
        return key_states, value_states

    def attended(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
        """Attend with `query` [1, heads, rows, head_dim], in the layer that has handed `key` and `value`: [1, rows, heads, head_dim].

        `window`: rows that a query sees, its own included; None: all.

        Raises: ModelError where that cannot be our attention.
        """
        assert self._attend is not None, "attention outside of a pass"
        handed, self._handed = self._handed, None
        if handed is None or handed[1] is not key or handed[2] is not value:
            raise ModelError("its modules attend to other keys and values than they hand to the cache")
        layer = handed[0]
        heads, kv_heads, size = self._heads
        rows = query.shape[2]
        found = [tuple(t.shape) for t in (query, key, value)]
        wanted = [(1, n, rows, size) for n in (heads, kv_heads, kv_heads)]
        if found != wanted:
            raise ModelError(
                f"its queries, keys and values have shapes {found}, and {wanted} was expected of its config"
            )
        if layer != self.layers_done:
            raise ModelError(f"layer {layer} attends when it is layer {self.layers_done}'s turn")
        if window is not None:
            self.windows[layer] = window
        attention = self._attentions[layer]
        attention.scale = size**-0.5 if scale is None else scale
        fused = torch.cat((*self._turned_back(layer, query, key), value[0]))  # [all heads, rows, head_dim]
        out = self._attend(layer, attention, fused.transpose(0, 1).flatten(1))
        self.layers_done = layer + 1
        return out.view(1, rows, heads, size)

    def _turned_back(self, layer: int, query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        """Return queries and keys [heads, rows, head_dim] without positions, if that can be."""
        if self._inverse is None or layer in self._unturned:
            return query[0], key[0]
        return tuple(rotate(self.ordered(t[0]).transpose(0, 1), self._inverse).transpose(0, 1) for t in (query, key))

    def ordered(self, x: Tensor) -> Tensor:
        """Return `x` [..., head_dim] with the dimensions of a head in the order of the rotary table."""
        order = self._turning.order
        return x if order is None else x.index_select(-1, order)


@dataclass(frozen=True, slots=True)
class Window:
    """What stands for a mask that leaves out all but the last `rows` rows of a context."""

    rows: int


def _mask(
    *, mask_function: Callable[..., Tensor], local_size: int | None = None, use_vmap: bool = False, **about: Any
) -> Window | None:
    """Make what modules hand on as the mask of attention. Raises: ModelError for a mask that is not causal."""
    if mask_function is causal_mask_function:
        return None
    if local_size is None or use_vmap or not _slides(mask_function, local_size):
        raise ModelError("its attention has a mask of its own")
    return Window(int(local_size))


def _slides(mask_function: Callable[..., Tensor], rows: int) -> bool:
    """Return whether a mask shows a query the last `rows` rows, its own included, as a chunk or a sink would not."""
    query = torch.tensor(3 * rows + 1)
    keys = query + torch.tensor([1, 0, 1 - rows, -rows, -int(query)])
    none = torch.tensor(0)
    return [bool(mask_function(none, none, query, key)) for key in keys] == [False, True, True, False, False]


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for a module of transformers. Raises: ModelError for an option that our attention does not have."""
    cache: HandingCache = module.afterglow  # type: ignore[assignment]
    window = options.pop("sliding_window", None)
    if isinstance(attention_mask, Window):
        if window not in (None, attention_mask.rows):
            raise ModelError(f"its attention has a window of {window} rows, and a mask of {attention_mask.rows}")
        window, attention_mask = attention_mask.rows, None
    if options.pop("is_causal", None) is False or getattr(module, "is_causal", True) is False:
        raise ModelError("its attention is not causal")
    options |= {"attention_mask": attention_mask, "dropout": dropout or None}
    for name, given in options.items():
        if given is not None and name not in HARMLESS:
            raise ModelError(f"its attention takes {name!r}, which is not known here")
    return cache.attended(query, key, value, scaling, window), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)
