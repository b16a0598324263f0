"""Attend to the important rows of a cached prefix: SPEC, for one request (§IV).

Each layer selects rows while the prompt is computed, and the request attends to these rows, at the positions that they had:
until the request ends, as in the paper, or until decoded tokens select anew (`--importance-renew`; a fact that a reply
retrieves is found by the reply's own attention). The request's own rows are approximate: they are not stored, or under a
salt of their own (`--importance-exact approximate`), when the request ends. Requests beside it are computed as always.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from afterglow.engine.transfers import fetched
from afterglow.importance.chunk_loader import ChunkLoader, RowsLost
from afterglow.importance.left_out import ChunkMeans, ChunkPlaces, LeftOut, chunk_places
from afterglow.importance.loaded_rows import LoadedRows, Pair
from afterglow.importance.prefix_loader import PrefixLoader
from afterglow.importance.select import Queries, RowSelector, Selection, SelectionRules, probes_of
from afterglow.importance.waits import Waits, at_hand
from afterglow.kernels.rope import LayerRotations, rotate
from afterglow.model.decoder import Decoder
from afterglow.plan.step import Selectable
from afterglow.request import Selected
from afterglow.store.extents.layout import KEYS, VALUES


class SelectiveAttention:
    """Hold what all selecting requests of an engine share."""

    def __init__(self, decoder: Decoder, loader: ChunkLoader, rules: SelectionRules, renew: int = 0) -> None:
        """`renew`: tokens after which decoded tokens select anew; 0: the prompt's selection stays."""
        self.decoder, self.loader, self.rules, self.renew = decoder, loader, rules, renew
        self.probes = probes_of(decoder.spec.heads, decoder.spec.kv_heads, rules.probe_heads)

    def begin(self, selectable: tuple[Selectable, ...], retention: float | None, exact: int = 0) -> PrefixSelection:
        """Begin a request. `retention`: the share of the prefix to select; None: the usual one. The first `exact` rows are
        always selected."""
        rules = self.rules if retention is None else replace(self.rules, retention=retention)
        selector = RowSelector(self.probes, rules, exact)
        asks = selector.asks(sum(view.stop - view.start for view in selectable))
        return PrefixSelection(self, PrefixLoader(self.loader, selectable, asks), selector)


@dataclass(slots=True)
class PrefixSelection:
    """Hold the rows that the layers of one request have selected.

    `kept`: by layer, rotated keys and values, [rows, kv_heads, head_dim]. `left_out`: by layer, the other rows as means; None where these
    are forgotten, or nothing is left out.
    """

    shared: SelectiveAttention
    prefix: PrefixLoader
    selector: RowSelector
    kept: list[Pair] = field(default_factory=list)
    left_out: list[LeftOut | None] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    renewals: int = 0  # times that all layers selected anew
    _loaded: list[LoadedRows | None] = field(default_factory=list)  # by layer; None where all rows are attended to
    _rotation: LayerRotations | None = None
    _places: ChunkPlaces | None = None  # where the store has means
    _averaged: LayerRotations | None = None  # of these chunks
    _decoded: int = 0  # tokens since the last selection
    _counted: int = -1  # own rows before the step whose tokens were counted last: it may be attempted again
    _renewing: bool = False
    _stuck: bool = False  # other rows of the prefix cannot be read any more

    def __post_init__(self) -> None:
        decoder = self.shared.decoder
        self._rotation = decoder.rotation(torch.arange(self.prefix.rows, device=decoder.device))
        if self.shared.loader.layout.means:
            self._places = chunk_places(self.prefix.views, decoder.device)
            if self._rotation is not None:
                self._averaged = self._rotation.averaged(self._places.rows, len(self._places.counts) - 1)

    @property
    def rows(self) -> int:
        """Count the rows of the prefix, selected or not. The request's own rows follow them."""
        return self.prefix.rows

    def summary(self) -> Selected:
        """Summarise the selection for the caller, once the prompt has been computed."""
        layers = len(self.selections)
        kept = sum(selection.kept for selection in self.selections) / max(1, layers)
        similar = sum(selection.kind == "shared" for selection in self.selections)
        whole = sum(selection.similarity is None for selection in self.selections)
        ever = [loaded.ever.sum() for loaded in self._loaded if loaded is not None]
        counts = iter(fetched(torch.stack(ever))[0] if ever else ())
        taken = [self.rows if loaded is None else next(counts) for loaded in self._loaded]
        return Selected(
            self.rows, kept, layers, layers - similar - whole, sum(taken) / layers if taken else kept, self.renewals
        )

    def layer(self, layer: int, q: Tensor, own: Tensor, scale: float) -> Waits[Pair]:
        """Get the rows that a layer attends to besides the request's own rows.

        `q` [new, heads, head_dim] and `own`, keys of these and all earlier own rows [own, kv_heads, head_dim], are rotated.
        They select while the prompt is computed, and as often as the engine renews.
        Raises: `RowsLost`, while the prompt is computed. Later the layer goes on with the rows that it has.
        """
        queries = Queries(layer, q, own, scale)
        if layer < len(self.kept):
            if layer == 0:
                self._count(len(own) - len(q), len(q))
            if self._renewing:
                yield from self._renew(queries)
            loaded = self._loaded[layer] if self._loaded else None
            return (loaded.keys, loaded.values) if loaded is not None and loaded.whole else self.kept[layer]
        if layer == 0:
            yield from self.prefix.open()
        found: dict[str, Tensor] = {}  # keys that were loaded to select by

        def probe_keys() -> Waits[Tensor]:
            found["probes"] = self._rotate(layer, (yield from self.prefix.probe_keys(layer)).to(q.device), None)
            if self.prefix.probes_all:
                found["all"] = found["probes"]
            return found["probes"]

        def all_keys() -> Waits[Tensor]:
            if "all" not in found:
                found["all"] = self._rotate(layer, (yield from self.prefix.all_keys(layer)).to(q.device), None)
            return found["all"]

        selection = yield from self._select(queries, probe_keys, all_keys)
        keys = found.get("all")
        rotated, values = yield from self.prefix.take(layer, selection, keys)
        rotated, values = rotated.to(q.device), values.to(q.device)
        if keys is None:
            rotated = self._rotate(layer, rotated, selection.rows)
        left_out = yield from self._means(layer, selection)
        self.kept.append((rotated, values))
        self.left_out.append(left_out)
        self.selections.append(selection)
        if self.shared.renew:
            self._remember(selection, found.get("probes"), keys)
        self.prefix.ahead(layer, selection)
        if layer + 1 == self.shared.decoder.spec.layers:
            self.prefix.close()
        return self.kept[layer]

    def _means(self, layer: int, selection: Selection) -> Waits[LeftOut | None]:
        """Load what stands for the rows that a layer leaves out. Raises: `RowsLost`."""
        if self._places is None or selection.kind == "all":
            return None
        keys, values = yield from self.prefix.means(layer)
        if not len(keys):
            return None
        rotation = None if self._averaged is None else self._averaged.at(layer)
        return ChunkMeans.of(keys, values, self._places, rotation).without(selection)

    def _select(
        self, queries: Queries, probe_keys: Callable[[], Waits[Tensor]], all_keys: Callable[[], Waits[Tensor]]
    ) -> Waits[Selection]:
        """Select, and count the seconds of that without loading."""
        loading = 0.0

        def timed(load: Callable[[], Waits[Tensor]]) -> Waits[Tensor]:
            nonlocal loading
            began = time.perf_counter()
            keys = yield from load()
            loading += time.perf_counter() - began
            return keys

        began = time.perf_counter()
        rows = self.prefix.rows
        selection = yield from self.selector.select(rows, queries, lambda: timed(probe_keys), lambda: timed(all_keys))
        self.shared.loader.stats.identifying += time.perf_counter() - began - loading
        return selection

    def _remember(self, selection: Selection, probe_keys: Tensor | None, keys: Tensor | None) -> None:
        """Remember which rows have been loaded, for later selections."""
        if selection.kind == "all" or probe_keys is None:
            self._loaded.append(None)
            return
        loaded = LoadedRows(self.rows, self.kept[-1][0])
        loaded.begin(selection, self.kept[-1])
        loaded.put_keys(slice(None), probe_keys if keys is None else keys)
        self.kept[-1] = loaded.kept
        self._loaded.append(loaded)

    def _count(self, before: int, tokens: int) -> None:
        """Count decoded tokens behind `before` own rows, and decide whether they select anew."""
        if before == self._counted:
            return
        self._counted = before
        self._decoded += tokens
        self._renewing = bool(
            self.shared.renew and self._decoded >= self.shared.renew and not self._stuck and any(self._loaded)
        )
        if self._renewing:
            self._decoded = 0
            self.renewals += 1

    def _renew(self, queries: Queries) -> Waits[None]:
        """Let decoded tokens select in one layer. If rows cannot be read, the layer keeps its selection."""
        layer, device = queries.layer, queries.q.device
        loaded, stats = self._loaded[layer], self.shared.loader.stats
        if loaded is None or loaded.whole or self._stuck:
            return

        def all_keys() -> Waits[Tensor]:
            yield from self._load_keys(loaded, layer, loaded.without_keys())
            return loaded.keys

        try:
            selection = yield from self._select(queries, lambda: at_hand(loaded.keys), all_keys)
            wanted = selection.wanted()
            yield from self._load_keys(loaded, layer, loaded.without_keys(wanted))
            if len(missing := loaded.without_values(wanted)):
                rows, values = yield from self.prefix.more(layer, VALUES, missing)
                loaded.put_values(rows.to(device), values.to(device))
        except RowsLost:
            self._stuck = True
            stats.failed_renewals += 1
            return
        loaded.renew(selection)
        self.kept[layer], self.selections[layer] = loaded.kept, selection
        if (before := self.left_out[layer]) is not None:
            self.left_out[layer] = None if loaded.whole else before.means.without(selection)
        stats.renewals += 1

    def _load_keys(self, loaded: LoadedRows, layer: int, missing: Tensor) -> Waits[None]:
        """Load keys of rows.

        Raises: `RowsLost`.
        """
        if len(missing):
            rows, keys = yield from self.prefix.more(layer, KEYS, missing)
            rows = rows.to(loaded.keys.device)
            loaded.put_keys(rows, self._rotate(layer, keys.to(loaded.keys.device), rows))

    def _rotate(self, layer: int, keys: Tensor, rows: Tensor | None) -> Tensor:
        """Rotate a layer's keys of rows of the prefix (None: all rows) to the rows' positions."""
        rotation = None if self._rotation is None else self._rotation.at(layer)
        if rotation is None:
            return keys
        cos, sin = rotation
        return rotate(keys, (cos, sin) if rows is None else (cos[rows], sin[rows]))
