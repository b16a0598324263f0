"""Requests that take only what is important of their cached prefix: SPEC, as an `Attend` (§IV; spec S1-S8, S16, S17).

What a layer selects while the prompt is computed is what the request attends to, at the positions that the rows had: until
it ends, as in the paper (S17), or until the tokens that it decodes are asked in turn (`--importance-renew`; a fact that a
reply retrieves is found by the reply's own attention). None of this is exact, so nothing of it is ever stored (spec X3);
requests beside it are computed as always.

Nor do those wait for it. Its prompt is a pass of its own (`Passing`), a few layers in each step while others decode; a pass
that has to wait for the disk is left where it is, and goes on in a later step. Tokens that are decoded go with those of
others (`Selecting`), and leave that pass, to go on in one of their own, when they would have to wait.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from afterglow.engine.gather import Part
from afterglow.importance.held import Held, Pair
from afterglow.importance.identify import (
    Rules,
    Selection,
    all_sums,
    behind,
    everything,
    fall_back,
    judge,
    probe_sums,
    probes_of,
)
from afterglow.importance.loader import Loader, LoaderStats, Lost
from afterglow.importance.prefix import Prefix, Waits
from afterglow.kernels.attention import attend, merge
from afterglow.kernels.rope import Rotation, rotate
from afterglow.model.decoder import Attention, Decoder, Hidden
from afterglow.plan.step import Selectable
from afterglow.request import Selected
from afterglow.store.layout import KEYS, VALUES
from afterglow.store.reading import Reading

log = logging.getLogger("afterglow.engine")


class Important:
    """What all such requests of an engine share."""

    def __init__(self, decoder: Decoder, loader: Loader, rules: Rules, renew: int = 0) -> None:
        """`renew`: tokens after which those that are being decoded select anew; 0: what the prompt selected stays."""
        self.decoder, self.loader, self.rules, self.renew = decoder, loader, rules, renew
        self.probes = probes_of(decoder.spec.heads, decoder.spec.kv_heads, rules.probe_heads)

    def begin(self, selectable: tuple[Selectable, ...], retention: float | None, exact: int = 0) -> Taking:
        """A request's prefix, of which it takes a share of `retention` (None: the usual one), and all of its first `exact`
        rows."""
        rules = self.rules if retention is None else replace(self.rules, retention=retention)
        return Taking(self, Prefix(self.loader, selectable), rules, exact)


@dataclass(slots=True)
class Taking:
    """One request: what its layers have taken of the prefix. `kept`: rotated keys, and values, [rows, kv_heads, head_dim]."""

    shared: Important
    prefix: Prefix
    rules: Rules
    exact: int = 0
    kept: list[Pair] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    renewals: int = 0  # times that all layers were asked anew
    _held: list[Held | None] = field(default_factory=list)  # by layer; None where all rows are attended to
    _rotation: Rotation | None = None
    _since: int = 0  # tokens decoded since they were last asked
    _asking: bool = False
    _stuck: bool = False  # the rest of the prefix cannot be read any more

    def __post_init__(self) -> None:
        decoder = self.shared.decoder
        self._rotation = decoder.rotation(torch.arange(self.prefix.rows, device=decoder.device))

    @property
    def rows(self) -> int:
        """Of the prefix, taken or not: the request's own rows come behind them."""
        return self.prefix.rows

    def summary(self) -> Selected:
        """For the caller, once the prompt has been computed."""
        layers = len(self.selections)
        kept = sum(selection.kept for selection in self.selections) / max(1, layers)
        similar = sum(selection.kind == "shared" for selection in self.selections)
        whole = sum(selection.similarity is None for selection in self.selections)
        taken = [self.rows if held is None else int(held.ever.sum()) for held in self._held]
        return Selected(
            self.rows, kept, layers, layers - similar - whole, sum(taken) / layers if taken else kept, self.renewals
        )

    def layer(self, layer: int, q: Tensor, own: Tensor, scale: float, room: Pair) -> Waits[Pair]:
        """What the layer attends to besides the request's own rows. `q` [new, heads, head_dim] and `own` [those and the ones
        before, kv_heads, head_dim], rotated, are asked when the prompt is computed, and then as often as the engine renews.
        `room`: memory for keys and values of the prefix's rows in this layer, [rows, kv_heads, head_dim], the same each time.
        Errors: `Lost`, of the prompt; later the layer goes on with what it has."""
        if layer < len(self.kept):
            if layer == 0:
                self._count(len(q))
            if self._asking:
                yield from self._renew(layer, q, own, scale, room)
            held = self._held[layer] if self._held else None
            return room if held is not None and held.whole else self.kept[layer]
        if layer == 0:
            yield from self.prefix.open()
        selection, keys, probe_keys = yield from self._select(layer, q, own, scale)
        rotated, values = yield from self.prefix.take(layer, selection, keys)
        rotated, values = rotated.to(q.device), values.to(q.device)
        if keys is None:
            rotated = self._rotate(rotated, selection.rows)
        self.kept.append((rotated, values))
        self.selections.append(selection)
        if self.shared.renew:
            self._hold(selection, probe_keys, keys, room)
        self.prefix.ahead(layer, selection)
        if layer + 1 == self.shared.decoder.spec.layers:
            self.prefix.close()
        return self.kept[layer]

    def _hold(self, selection: Selection, probe_keys: Tensor | None, keys: Tensor | None, room: Pair) -> None:
        """Remember what has been loaded, for the tokens to come."""
        if selection.kind == "all" or probe_keys is None:
            self._held.append(None)
            return
        held = Held(*room)
        held.begin(selection, self.kept[-1])
        held.put_keys(slice(None), probe_keys if keys is None else keys)
        self.kept[-1] = held.kept
        self._held.append(held)

    def _count(self, tokens: int) -> None:
        """Tokens have been decoded: are they to be asked?"""
        self._since += tokens
        self._asking = bool(
            self.shared.renew and self._since >= self.shared.renew and not self._stuck and any(self._held)
        )
        if self._asking:
            self._since = 0
            self.renewals += 1

    def _renew(self, layer: int, q: Tensor, own: Tensor, scale: float, room: Pair) -> Waits[None]:
        """Let the tokens that are being decoded select. What they want is known afterwards, or the layer stays as it is."""
        held, stats = self._held[layer], self.shared.loader.stats
        if held is None or held.whole or self._stuck:
            return
        held.keys, held.values = room  # the context may have grown, and moved
        try:
            selection = yield from self._select_again(held, layer, q, own, scale)
            wanted = selection.wanted()
            yield from self._know_keys(held, layer, held.without_keys(wanted))
            if len(missing := held.without_values(wanted)):
                rows, values = yield from self.prefix.more(layer, VALUES, missing)
                held.put_values(rows.to(q.device), values.to(q.device))
        except Lost:
            self._stuck = True
            stats.failed_renewals += 1
            return
        held.renew(selection)
        self.selections[layer] = selection
        stats.renewals += 1

    def _know_keys(self, held: Held, layer: int, missing: Tensor) -> Waits[None]:
        """Errors: `Lost`."""
        if len(missing):
            rows, keys = yield from self.prefix.more(layer, KEYS, missing)
            rows = rows.to(held.keys.device)
            held.put_keys(rows, self._rotate(keys.to(held.keys.device), rows))

    def _select_again(self, held: Held, layer: int, q: Tensor, own: Tensor, scale: float) -> Waits[Selection]:
        """What decoded tokens find important. Errors: `Lost`."""
        shared, rules, exact = self.shared, self.rules, self.exact
        k = rules.keep(self.prefix.rows - exact)
        assert k is not None, "all rows are taken"
        began, away = time.perf_counter(), self.prefix.away
        voted = probe_sums(shared.probes, q, held.keys, own, scale=scale)
        verdict = judge(voted[:, exact:], k, rules)
        found = verdict.selection
        if found is None:
            yield from self._know_keys(held, layer, held.without_keys())
            sums = all_sums(shared.probes, voted, q, held.keys, own, scale=scale)
            found = fall_back(sums[:, exact:], k, rules, verdict)
        shared.loader.stats.identifying += time.perf_counter() - began - (self.prefix.away - away)
        return behind(found, exact)

    def _select(
        self, layer: int, q: Tensor, own: Tensor, scale: float
    ) -> Waits[tuple[Selection, Tensor | None, Tensor | None]]:
        """What the layer finds important; all keys, and the probe heads', rotated, where they were needed for it."""
        shared, rules = self.shared, self.rules
        exact = self.exact
        k = rules.keep(self.prefix.rows - exact)
        if k is None:
            return everything(self.prefix.rows), None, None
        probe_keys = self._rotate((yield from self.prefix.probe_keys(layer)).to(q.device), None)
        began = time.perf_counter()
        voted = probe_sums(shared.probes, q, probe_keys, own, scale=scale)
        verdict = judge(voted[:, exact:], k, rules)
        shared.loader.stats.identifying += time.perf_counter() - began
        if verdict.selection is not None:
            return behind(verdict.selection, exact), None, probe_keys
        keys = self._rotate((yield from self.prefix.all_keys(layer)).to(q.device), None)
        began = time.perf_counter()
        sums = all_sums(shared.probes, voted, q, keys, own, scale=scale)
        found = behind(fall_back(sums[:, exact:], k, rules, verdict), exact)
        shared.loader.stats.identifying += time.perf_counter() - began
        return found, keys, probe_keys

    def _rotate(self, keys: Tensor, rows: Tensor | None) -> Tensor:
        """Keys of rows of the prefix (None: all), at the positions that these have."""
        if self._rotation is None:
            return keys
        cos, sin = self._rotation
        return rotate(keys, (cos, sin) if rows is None else (cos[rows], sin[rows]))


class Patience:
    """How long a step may wait for the disk: `left` seconds, for all that it waits for together."""

    def __init__(self, seconds: float, stats: LoaderStats) -> None:
        self.left = seconds
        self._stats = stats

    def wait(self, reading: Reading) -> bool:
        """Whether it has ended by then."""
        if not reading.ended and self.left > 0:
            began = time.perf_counter()
            reading.wait(self.left)
            took = time.perf_counter() - began
            self.left -= took
            self._stats.waited += took
        return reading.ended


class Passing:
    """A pass of one such request's rows through the decoder, apart from others': it is left where it would have to wait for the
    disk, or has had its share of a step, and goes on in another. An `Attend`."""

    def __init__(
        self,
        taking: Taking,
        part: Part,
        hidden: Hidden,
        work: Waits[Tensor] | None = None,
        waits_for: Reading | None = None,
    ) -> None:
        """`work`: what the layer it is at has begun, and waits for."""
        self.taking, self.part, self.hidden = taking, part, hidden
        self._work, self._waits_for, self._since = work, waits_for, time.monotonic()
        self.exhausted = False  # has the device no memory for it?
        decoder = taking.shared.decoder
        self._angles = decoder.rotation(torch.arange(part.start, part.stop, device=decoder.device))

    @property
    def over(self) -> bool:
        """Are all layers through, or will they never be?"""
        through = self.hidden.layer == self.taking.shared.decoder.spec.layers
        return through or self.exhausted or self.part.failed is not None

    @property
    def waits_for(self) -> Reading | None:
        """What it cannot go on without, if that has not ended and is not too late."""
        reading = self._waits_for
        late = time.monotonic() - self._since >= self.taking.shared.loader.timeout
        return None if reading is None or reading.ended or late else reading

    def go_on(self, layers: int, wanted: Tensor | None) -> int:
        """Through so many layers more, as far as it need not wait; returns how many. What is lost is the part's `failed`."""
        decoder, first = self.taking.shared.decoder, self.hidden.layer
        try:
            decoder.go_on(self.hidden, self, wanted, min(first + layers, decoder.spec.layers))
        except _Waiting:
            pass
        except Lost as lost:
            self.part.failed = lost.extent
        except torch.OutOfMemoryError as error:
            log.warning("the device has no memory for %d rows that select: %s", len(self.hidden.x), error)
            self.exhausted = True
        return self.hidden.layer - first

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        """See `Attend`."""
        part = self.part
        if self._work is None:
            q, k, v = attention.project(x)
            q, k = attention.rotate_both(q, k, self._angles)
            part.context.keys(layer)[part.start : part.stop] = k
            part.context.values(layer)[part.start : part.stop] = v
            self._work = attended(self.taking, part, layer, q, attention.scale)
        try:
            while True:
                self._waits_for, self._since = next(self._work), time.monotonic()
                if self.waits_for is not None:
                    raise _Waiting
        except StopIteration as ended:
            self._work = self._waits_for = None
            out: Tensor = ended.value
            return out.flatten(1)


class _Waiting(Exception):
    """A pass cannot go on now."""


def attended(taking: Taking, part: Part, layer: int, q: Tensor, scale: float) -> Waits[Tensor]:
    """A part's rows, attended in one layer to what matters of the prefix and to its own rows, which are in its context up to
    there: [rows, heads, head_dim]. Errors: `Lost`, of the prompt."""
    keys, values = part.context.keys(layer), part.context.values(layer)
    own = keys[part.own_from : part.stop], values[part.own_from : part.stop]
    room = keys[: part.own_from], values[: part.own_from]
    kept = yield from taking.layer(layer, q, own[0], scale, room)
    parts = [attend(q, *kept, scale=scale, causal=False), attend(q, *own, scale=scale, causal=True)]
    return merge(parts)[0]


class Selecting:
    """Attends for the parts of a step that have selected before and go on: tokens that are decoded, in the pass of all others. One
    that would have to wait for longer than `patience` leaves the pass: what that makes of it is void, and it is in
    `left`."""

    def __init__(self, takings: dict[int, Taking], parts: list[Part], patience: Patience) -> None:
        """`takings` by job."""
        self._takings = [(part, takings[part.job]) for part in parts]
        self._patience = patience
        self.hidden: Hidden | None = None  # the pass
        self.left: dict[int, Passing] = {}
        for part, taking in self._takings:
            part.own_from = taking.rows

    def attend(self, layer: int, scale: float, q: Tensor, out: Tensor) -> None:
        """See `Beside`."""
        assert self.hidden is not None
        for part, taking in self._takings:
            out[part.where] = 0
            if part.job in self.left:
                continue
            work = attended(taking, part, layer, q[part.where], scale)
            try:
                while self._patience.wait(reading := next(work)):
                    pass
                self.left[part.job] = Passing(taking, part, self.hidden.part(part.where), work, reading)
            except StopIteration as ended:
                out[part.where] = ended.value
