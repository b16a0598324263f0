"""Registered prefixes by name: computed once, then kept in host and on disk, and on the device where there is room.

It knows which extents hold their rows, and keeps them; not how rows come to be (as those of any job whose prompt begins
so), nor whose requests begin so. A registered prefix is known again after a restart, as long as its extents are.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from afterglow.errors import RequestError
from afterglow.plan.options import Capacity
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.index import Index
from afterglow.plan.prefix.salts import covers, tenant_of
from afterglow.plan.prefix.shared_prefixes import OPERATOR, SharedPrefix
from afterglow.plan.tiers.device import Device
from afterglow.plan.tiers.placement import Placement

MAX_PREFIXES = 16  # of a tenant
KEPT_SHARE = 2  # of host, and of the disk, at most this part is kept for all prefixes together
MAX_ABOUT_BYTES = 56_000  # bytes of what a caller wants to be told again after a restart: a note holds no more
RENOTE_AFTER = 4096  # other notes, after which these are written anew: the oldest notes go first


@dataclass(eq=False, slots=True)
class _Registration:
    """`prefix`: None while it is not known (after a restart that has lost its rows). `extents`: those that are pinned;
    `whole`: they have all of its rows."""

    salt: str
    name: str
    about: str
    prefix: SharedPrefix | None = None
    extents: dict[Extent, None] = field(default_factory=dict)
    whole: bool = False


@dataclass(frozen=True, slots=True)
class PrefixState:
    """A registered prefix as callers see it, in tokens. `rows`: of the prefix; each tier says how many rows it holds.
    `about`: the caller's own text. `kept`: all of its rows are pinned. `writing`: its rows are on disk, are being written,
    or soon will be."""

    name: str
    rows: int
    device: int
    host: int
    disk: int
    about: str
    shared: bool
    kept: bool
    writing: bool = False
    tokens: bytes = b""  # empty: not known, after a restart that has lost its rows


class Registered:
    """All registered prefixes, by salt and name. `quota`: bytes that a tenant may have."""

    def __init__(
        self, capacity: Capacity, index: Index, placement: Placement, device: Device, quota: int | None
    ) -> None:
        self._capacity = capacity
        self._index = index
        self._placement = placement
        self._device = device
        self._pins = placement.pins
        self._quota = quota
        self._all: dict[tuple[str, str], _Registration] = {}
        self._notes: dict[str, str | None] = {}
        self._others = 0  # notes of other kinds since these were written
        self._seen = -1  # the index's version when it was last looked at

    def __len__(self) -> int:
        return len(self._all)

    @property
    def rows(self) -> int:
        """Count the tokens of all registered prefixes."""
        return sum(each.prefix.rows for each in self._all.values() if each.prefix is not None)

    def register(self, salt: str, name: str, tokens: bytes, about: str, now: float) -> None:
        """Keep the rows of these tokens from now on, as soon as they are there; in place of others of the same name.

        Raises:
            RequestError: they are too many for a tier or for the tenant.
        """
        before = self._all.get((salt, name))
        if before is None and sum(_same(salt, other) for other, _ in self._all) >= MAX_PREFIXES:
            raise RequestError(f"{MAX_PREFIXES} prefixes are registered already; delete one first", param="name")
        if len(about.encode("utf-8", "surrogatepass")) > MAX_ABOUT_BYTES:
            raise RequestError(f"at most {MAX_ABOUT_BYTES} bytes of text can be kept with a prefix", param="text")
        prefix = SharedPrefix(salt, tokens)
        self._refuse_too_large(prefix, before)
        if before is not None and before.prefix == prefix:
            before.about = about
            self._note(before)
            for extent in before.extents:
                self._write(extent, now)  # unless that has been done: it may have failed
            return
        self.forget(salt, name)
        found = self._all[salt, name] = _Registration(salt, name, about, prefix)
        self._index.prefixes.add(prefix)
        self._promise()
        self._look(found, now)
        self._note(found)

    def forget(self, salt: str, name: str) -> bool:
        """Keep a prefix's rows no longer than others. False: there is none of that name."""
        found = self._all.pop((salt, name), None)
        if found is None:
            return False
        self._promise()
        for extent in found.extents:
            self._placement.unpin(extent)
        if found.prefix is not None:
            self._index.prefixes.remove(found.prefix)
            if found.prefix not in self._index.prefixes:
                self._device.let_go(salt, found.prefix.tokens)
        self._notes[_key(found)] = None
        return True

    def forget_all(self, whose: str | None) -> None:
        """Forget what tenants have registered (see `covers`)."""
        for salt, name in [key for key in self._all if key[0] != OPERATOR and covers(whose, key[0])]:
            self.forget(salt, name)

    def listing(self) -> dict[str, list[PrefixState]]:
        """List the registered prefixes by salt, under one salt by name."""
        found: dict[str, list[PrefixState]] = {}
        for (salt, _), each in sorted(self._all.items(), key=lambda item: item[0]):
            found.setdefault(salt, []).append(self._state(each))
        return found

    def kept(self, salt: str, tokens: bytes, turns: tuple[int, ...]) -> tuple[int, ...]:
        """Return the rows at which turns end, the first one no earlier than the registered prefix of these tokens: no row of that
        is ever left out."""
        rows = max((each.rows for each in self._index.prefixes.of(salt) if tokens.startswith(each.tokens)), default=0)
        if not rows or (turns and turns[0] >= rows):
            return turns
        return (rows, *(turn for turn in turns if turn > rows))

    def refresh(self, now: float) -> None:
        """Pin registered rows that have come into the index, and unpin those that have left it. Before each step."""
        if self._index.version == self._seen:
            return
        self._seen = self._index.version
        for each in self._all.values():
            if not each.whole or any(extent.dead for extent in each.extents):
                self._look(each, now)

    def _look(self, each: _Registration, now: float) -> None:
        if each.prefix is None:
            return
        match = self._index.match(each.salt, each.prefix.tokens)
        found = dict.fromkeys(view.extent for view in match.views)
        before, each.extents = each.extents, found
        for extent in found:
            if extent not in before:
                self._placement.pin(extent)
                self._write(extent, now)
        for extent in before:
            if extent not in found:
                self._placement.unpin(extent)
        if each.whole != (match.rows == each.prefix.rows) or found.keys() != before.keys():
            each.whole = match.rows == each.prefix.rows
            self._note(each)

    def _write(self, extent: Extent, now: float) -> None:
        if self._capacity.disk_bytes and extent.disk == "absent":
            self._placement.write_back.write(extent, now, "write_through")

    def _refuse_too_large(self, prefix: SharedPrefix, instead_of: _Registration | None) -> None:
        others = [each.prefix for each in self._all.values() if each is not instead_of and each.prefix is not None]
        own = [other for other in others if _same(other.salt, prefix.salt)]
        slots = sum(self._capacity.blocks(each.rows) for each in {*others, prefix})
        if slots > self._capacity.host_slots // KEPT_SHARE:
            rows = self._capacity.host_slots // KEPT_SHARE * self._capacity.block_rows
            raise RequestError(_too_large(prefix, rows, "half of the host cache", "--host-cache"), param="text")
        size = sum(self._bytes(each) for each in {*others, prefix})
        if self._capacity.disk_bytes and size > self._capacity.disk_bytes // KEPT_SHARE:
            rows = self._rows_in(self._capacity.disk_bytes // KEPT_SHARE)
            raise RequestError(_too_large(prefix, rows, "half of the disk cache", "--disk-cache"), param="text")
        if prefix.salt != OPERATOR:
            room = self._pins.most - self._pins.kept(prefix.salt)
            if sum(map(self._size, {*own, prefix})) > room:
                rows = max(0, room) * self._capacity.max_extent_rows // self._pins.size(self._capacity.max_extent_rows)
                raise RequestError(_too_large(prefix, rows, "what a tenant may pin", "--tenant-pins"), param="text")
        if self._quota is not None and prefix.salt != OPERATOR:
            if sum(self._bytes(each) for each in {*own, prefix}) > self._quota // KEPT_SHARE:
                rows = self._rows_in(self._quota // KEPT_SHARE)
                raise RequestError(_too_large(prefix, rows, "half of a tenant's quota", "--tenant-quota"), param="text")

    def _promise(self) -> None:
        """Tell the pins how much is registered for each tenant."""
        own: dict[str, set[SharedPrefix]] = {}
        for each in self._all.values():
            if each.prefix is not None and each.salt != OPERATOR:
                own.setdefault(tenant_of(each.salt), set()).add(each.prefix)
        self._pins.promise({tenant: sum(map(self._size, prefixes)) for tenant, prefixes in own.items()})

    def _size(self, prefix: SharedPrefix) -> int:
        """Return how much a prefix counts among the pins."""
        whole, rest = divmod(prefix.rows, self._capacity.max_extent_rows)
        return whole * self._pins.size(self._capacity.max_extent_rows) + (self._pins.size(rest) if rest else 0)

    def _bytes(self, prefix: SharedPrefix) -> int:
        most = self._capacity.max_extent_rows
        whole, rest = divmod(prefix.rows, most)
        return whole * self._capacity.file_size(most) + (self._capacity.file_size(rest) if rest else 0)

    def _rows_in(self, size: int) -> int:
        return int(size / self._capacity.file_bytes[-1] * self._capacity.max_extent_rows)

    def _state(self, each: _Registration) -> PrefixState:
        if each.prefix is None:
            return PrefixState(each.name, 0, 0, 0, 0, each.about, each.salt == OPERATOR, kept=False)
        match = self._index.match(each.salt, each.prefix.tokens)

        def rows(tier: str) -> int:
            return sum(view.stop - view.start for view in match.views if getattr(view.extent, tier) == "ready")

        device = max(
            (
                context.rows
                for context in self._device.contexts.values()
                if context.salt == each.salt and context.tokens == each.prefix.tokens
            ),
            default=0,
        )
        return PrefixState(
            each.name,
            each.prefix.rows,
            device,
            rows("host"),
            rows("disk"),
            each.about,
            each.salt == OPERATOR,
            each.whole,
            all(
                view.extent.disk == "ready" or self._placement.write_back.is_written(view.extent)
                for view in match.views
            ),
            each.prefix.tokens,
        )

    # ------------------------------------------------------------------------------------------- over restarts

    def _note(self, each: _Registration) -> None:
        last, stop = "", 0
        if each.whole and each.prefix is not None:
            view = self._index.match(each.salt, each.prefix.tokens).views[-1]
            last, stop = view.extent.id, view.stop
        facts = [each.salt, each.name, last, stop, each.about]
        self._notes[_key(each)] = json.dumps(facts, ensure_ascii=False)

    def take_notes(self, others: int) -> list[tuple[str, str | None]]:
        """Return the notes that have changed since the last call. `others`: how many notes of other kinds are written now."""
        self._others += others
        if self._others > RENOTE_AFTER:
            for each in self._all.values():
                self._note(each)
        if self._notes:
            self._others = 0
        notes, self._notes = self._notes, {}
        return list(notes.items())

    def recall(self, notes: Mapping[str, str]) -> None:
        """Take over notes after a restart, when the extents are there again. Unreadable notes are ignored."""
        pinned: dict[Extent, None] = {}
        for key, text in notes.items():
            try:
                salt, name, last, stop, about = json.loads(text)
                found = _Registration(str(salt), str(name), str(about))
            except (ValueError, TypeError):
                continue
            if key != _key(found):
                continue
            extent = self._index.extents.get(last)
            if extent is not None and 0 < stop <= extent.rows:
                prefix = SharedPrefix(found.salt, self._index.before(extent) + extent.tokens[: 4 * stop])
                views = self._index.match(prefix.salt, prefix.tokens).views
                files = pinned | dict.fromkeys(view.extent for view in views)  # with rows that are not the prefix's
                with contextlib.suppress(RequestError):  # a budget may be smaller now
                    self._refuse_too_large(prefix, None)
                    if sum(extent.file_bytes for extent in files) <= self._capacity.disk_bytes:
                        found.prefix, pinned = prefix, files
            self._all[found.salt, found.name] = found
            if found.prefix is not None:
                self._index.prefixes.add(found.prefix)
        self._promise()
        for each in self._all.values():
            self._look(each, 0.0)

    def holds(self, extent: Extent) -> int:
        """Count the registered prefixes that pin an extent."""
        return sum(extent in each.extents for each in self._all.values())

    def pins(self) -> list[Extent]:
        """List the pinned extents, once per pin."""
        return [extent for each in self._all.values() for extent in each.extents]


def _same(salt: str, other: str) -> bool:
    """Are both the operator's, or one tenant's?"""
    return (salt == OPERATOR) == (other == OPERATOR) and tenant_of(salt) == tenant_of(other)


def _key(each: _Registration) -> str:
    return json.dumps([each.salt, each.name])


def _too_large(prefix: SharedPrefix, rows: int, what: str, option: str) -> str:
    return (
        f"the registered prefix has {prefix.rows} tokens; together with others that are registered it may have {rows},"
        f" {what}: enlarge {option}, or shorten it"
    )
