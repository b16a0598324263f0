"""Conversations by name: which extents they have used, whether they are pinned, and how they end.

It knows extents and placement; not jobs, not queues. A conversation is one tenant's; its extents may be others' too (a
system prompt), and those outlive it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Any

from afterglow.errors import RequestError
from afterglow.plan.prefix.extent import NONE, Extent, Session, View, with_key, without_key
from afterglow.plan.prefix.index import Index
from afterglow.plan.prefix.salts import covers
from afterglow.plan.tiers.placement import Placement

MAX_SESSIONS = 65_536  # conversations that are remembered by name; pinned ones are never forgotten


@dataclass(frozen=True, slots=True)
class SessionState:
    """A conversation as callers see it. The tiers count rows where they are fastest to reach."""

    name: str
    rows: int
    device: int
    host: int
    disk: int
    used: float
    expires: float | None
    pinned: bool


class Sessions:
    """All conversations with a name."""

    def __init__(self, index: Index, placement: Placement) -> None:
        self._index = index
        self._placement = placement
        self._pins = placement.pins
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()  # least recently used first
        self._notes: dict[str, str | None] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def used(self, tenant: str, name: str, path: Iterable[View], now: float) -> None:
        """Note that a turn of a conversation has ended, whose context was this path."""
        self.bury()
        key = (tenant, name)
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(tenant, name, now)
        self._sessions.move_to_end(key)
        session.used = now
        for view in path:
            self._add(session, view.extent, view.stop)
        self._note(session)
        for old, other in list(islice(self._sessions.items(), max(0, len(self._sessions) - MAX_SESSIONS))):
            if not other.pinned:
                self._drop(old)

    def _add(self, session: Session, extent: Extent, stop: int) -> None:
        if extent.dead:
            return
        known = session.extents.get(extent)
        session.extents[extent] = max(stop, known or 0)
        if known is None:
            extent.sessions = with_key(extent.sessions, session)
            if session.pinned and self._pins.cost(extent) <= self._pins.room(extent.salt):
                self._keep(session, extent)

    def _keep(self, session: Session, extent: Extent) -> None:
        session.kept[extent] = None
        self._pins.keep(extent)

    def replace(self, parts: Sequence[Extent], whole: Extent) -> None:
        """Put a merged extent in the place of its parts, which the same conversations have used."""
        stops: dict[Session, int] = {}
        for part in parts:
            for session in part.sessions:
                stops[session] = part.first_row + session.extents.pop(part) - whole.first_row
                session.kept.pop(part, None)
            part.sessions = NONE
        for session, stop in stops.items():
            self._add(session, whole, stop)
            self._note(session)

    def listing(self, tenant: str) -> list[SessionState]:
        """List one tenant's conversations, the last used first."""
        self.bury()
        own = [session for session in self._sessions.values() if session.tenant == tenant]
        return [_state(session) for session in sorted(own, key=lambda item: -item.used)]

    def pin(self, tenant: str, name: str, pinned: bool) -> bool:
        """Keep a conversation in some tier whatever happens, or no longer. False: there is none of that name.
        A pinned conversation's later rows are pinned as far as there is room.

        Raises:
            RequestError: the tenant may pin no more.
        """
        self.bury()
        session = self._sessions.get((tenant, name))
        if session is None:
            return False
        if session.pinned != pinned:
            if pinned:
                more, room = sum(map(self._pins.cost, session.extents)), self._pins.room(tenant)
                if more > room:
                    raise _no_room(more, room, self._pins.most)
                for extent in session.extents:
                    self._keep(session, extent)
            for extent in session.kept if not pinned else ():
                self._pins.release(extent)
            session.kept = session.kept if pinned else {}
            session.pinned = pinned
            self._note(session)
            self._drop_if_empty(session)
        return True

    def is_pinned(self, tenant: str, name: str) -> bool | None:
        """Tell whether a conversation is pinned. None: there is none of that name."""
        session = self._sessions.get((tenant, name))
        return session.pinned if session is not None else None

    def forget(self, tenant: str, name: str) -> bool:
        """Remove a conversation and all that only it has used, from all tiers. False: there is none of that name."""
        session = self._sessions.get((tenant, name))
        if session is None or not self.pin(tenant, name, False):
            return False
        own = list(session.extents)
        self._drop((tenant, name))
        self.discard(own)
        return True

    def discard(self, extents: Iterable[Extent]) -> None:
        """Remove the extents that no named conversation has used and that are not in use."""
        for extent in sorted(extents, key=lambda e: -e.first_row):
            if not (extent.dead or extent.sessions or extent.ref_count or extent.is_read or extent.has_children):
                self._placement.forget(extent, "deleted")

    def forget_all(self, whose: str | None) -> None:
        """Forget the names (not the rows) of conversations (see `covers`); pins end with them."""
        for key in list(self._sessions):
            if covers(whose, key[0]):
                self.pin(*key, pinned=False)
                self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        session = self._sessions.pop(key, None)
        if session is None:
            return
        for extent in session.extents:
            extent.sessions = without_key(extent.sessions, session)
        self._notes[_key(session)] = None

    def bury(self) -> None:
        """Take forgotten extents out of their conversations. A name goes with the last row, unless it is pinned."""
        lost, self._placement.lost = self._placement.lost, []
        for extent in lost:
            for session in extent.sessions:
                del session.extents[extent]
                session.kept.pop(extent, None)
                self._drop_if_empty(session)
            extent.sessions = NONE

    def _drop_if_empty(self, session: Session) -> None:
        if not (session.extents or session.pinned):
            self._drop((session.tenant, session.name))

    # ------------------------------------------------------------------------------------------- over restarts

    def _note(self, session: Session) -> None:
        extents = [each.id if stop == each.rows else [each.id, stop] for each, stop in session.extents.items()]
        facts = [session.tenant, session.name, session.used, session.pinned, extents]
        self._notes[_key(session)] = json.dumps(facts)

    def take_notes(self) -> list[tuple[str, str | None]]:
        """Return the notes that have changed since the last call."""
        self.bury()
        notes, self._notes = self._notes, {}
        return list(notes.items())

    def recall(self, notes: Mapping[str, str]) -> None:
        """Take over notes after a restart, when the extents are there again. Unreadable notes are ignored."""
        found: list[Session] = []
        ends: dict[Extent, float] = {}
        for key, text in notes.items():
            try:
                tenant, name, used, pinned, names = json.loads(text)
                session = Session(tenant, name, float(used), bool(pinned))
                there = self._there(names)
                if isinstance(names, dict):  # as notes were when extents did not know their ends themselves
                    for extent in there:
                        when = names[extent.id]
                        ends[extent] = max(float(when) if when is not None else inf, ends.get(extent, -inf))
            except (ValueError, TypeError, AttributeError):
                continue
            if key != _key(session):
                continue
            if not (there or session.pinned):
                self._notes[key] = None
                continue
            for extent, stop in there.items():
                self._add(session, extent, stop)
            found.append(session)
        for extent, when in ends.items():
            if extent.expires == inf:
                extent.expires = -inf
                self._placement.expire(extent, when)
        for session in sorted(found, key=lambda item: (item.used, item.tenant, item.name)):
            self._sessions[(session.tenant, session.name)] = session

    def _there(self, noted: Iterable[Any]) -> dict[Extent, int]:
        """Find extents and stops by a note: an id stands for all rows, else the stop is beside it."""
        found = {}
        for each in noted:
            name, stop = each if isinstance(each, list) else (each, None)
            extent = self._index.extents.get(name)
            if extent is not None:
                found[extent] = extent.rows if stop is None else int(stop)
        return found


def _key(session: Session) -> str:
    return json.dumps([session.tenant, session.name])


def _no_room(more: int, room: int, most: int) -> RequestError:
    return RequestError(
        f"this conversation is too long to be pinned: of the {most} units (bytes; blocks without a disk tier) that a tenant may"
        f" pin, {max(0, room)} are left, and it takes {more}; unpin another one, or let the operator raise --tenant-pins",
        status=409,
        code="pin_limit",
    )


def _state(session: Session) -> SessionState:
    device = host = disk = 0
    for extent, stop in session.extents.items():
        rows = sum(max(0, min(node.stop, stop) - node.start) for node in extent.nodes)  # those that no other extent has
        if extent.contexts:
            device += rows
        elif extent.host == "ready":
            host += rows
        else:
            disk += rows
    expires = max((extent.expires for extent in session.extents), default=inf)
    return SessionState(
        session.name,
        device + host + disk,
        device,
        host,
        disk,
        session.used,
        expires if expires < inf and not session.pinned else None,
        session.pinned,
    )
