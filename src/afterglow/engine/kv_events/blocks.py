"""Blocks of 64 tokens with chained hashes, made of extents, whose borders lie anywhere. It knows no socket and no encoding.

A block is named by a hash of its tokens and of the block before it, and counts to the extent with its last row. It is on
the device, in host or on disk when all its rows are, those in extents above it included. One whose rows lie partly in host
and partly on disk counts as on disk, where it has to be read from: so all blocks of the index are somewhere.

Extents that have changed since the last step are noted on the engine's thread, which does no more for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from afterglow.config import BLOCK_ROWS
from afterglow.plan.cache import Cache
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.shared_prefixes import OPERATOR
from afterglow.plan.prefix.tree import common_rows
from afterglow.plan.step import ExtentId

Medium: TypeAlias = Literal["GPU", "CPU", "STORAGE"]  # vLLM's names: device, host, disk
MEDIA: tuple[Medium, ...] = ("GPU", "CPU", "STORAGE")
MOST_BLOCKS = 1024  # in one event
# Tiers (bits in the order of MEDIA) -> one extent that has a block there, counted in 16 bits a tier.
_ONE = tuple(sum((tiers >> bit & 1) << 16 * bit for bit in range(len(MEDIA))) for tiers in range(1 << len(MEDIA)))


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Blocks of one path, each behind the one before it, that are in a tier now. `parent`: the hash of the block before the
    first. `salt`: what sets the first block apart from others with its tokens, hashed; "": nothing. `tokens`: uint32."""

    medium: Medium
    hashes: tuple[int, ...]
    parent: int | None
    salt: str
    tokens: bytes


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """Blocks that are in a tier no more."""

    medium: Medium
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClearedBlocks:
    """No block is in any tier; those that are follow."""


KVEvent: TypeAlias = StoredBlocks | RemovedBlocks | ClearedBlocks


@dataclass(slots=True)
class _Run:
    """Rows of an extent on its path. `lead`: tokens of its first block that lie above it; `parent`: the hash before that
    block; `salt`: see `StoredBlocks`."""

    state: ExtentState
    lead: bytes
    parent: int | None
    salt: str
    hashes: tuple[int, ...] = ()  # of the blocks that end in it
    tiers: bytes = b""  # of each of them, as bits in the order of MEDIA
    below: dict[ExtentId, None] = field(default_factory=dict)

    @property
    def start(self) -> int:
        return self.state.start

    @property
    def stop(self) -> int:
        return self.start + len(self.state.tokens) // 4 - self.state.first

    @property
    def tokens(self) -> bytes:
        """Return the tokens from the beginning of its first block on."""
        return self.lead + self.state.tokens[4 * self.state.first :]


class Blocks:
    """What consumers know, and what is true: events are the difference."""

    def __init__(self, seed: str) -> None:
        """`seed`: names the model; equal blocks of different models have different hashes."""
        self._seed = hashlib.blake2b(seed.encode(), digest_size=32).digest()
        self._runs: dict[ExtentId, _Run] = {}
        # By block: how many extents have it in each tier. Several have it where their tokens are the same, and neither has a salt
        # that is published: an operator's prefix, and rows from before it was registered or of prompts that begin with a part of that prefix.
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        """Count the blocks that are in any tier."""
        return len(self._counts)

    def apply(self, changes: Changes) -> list[KVEvent]:
        """Take over changes of extents. Returns the events that tell of them."""
        events: list[KVEvent] = []
        if changes.anew:
            self._runs.clear()
            self._counts.clear()
            events.append(ClearedBlocks())
        before: dict[int, int] = {}  # tiers of blocks that runs have gained or lost
        for name in changes.gone:
            if (run := self._runs.pop(name, None)) is not None:
                self._count(run, bytes(len(run.hashes)), before)
                if (above := self._runs.get(run.state.above or "")) is not None:
                    above.below.pop(name, None)
        touched = [run for run in map(self._place, changes.states) if run is not None]
        affected: dict[ExtentId, _Run] = {}
        for run in touched:
            self._add_affected(run, affected)
        for run in affected.values():
            self._count(run, bytes(self._tiers(run)), before)
        events += self._removed(before)
        for run in sorted(affected.values(), key=lambda run: run.start):
            events += self._stored(run, before)
        return events

    def _count(self, run: _Run, tiers: bytes, before: dict[int, int]) -> None:
        """Take over where the blocks of a run are now. `before` gets the tiers that each changed one had."""
        for block, old, new in zip(run.hashes, run.tiers or bytes(len(run.hashes)), tiers, strict=True):
            if old == new:
                continue
            before.setdefault(block, self._held(block))
            if counts := self._counts.get(block, 0) + _ONE[new] - _ONE[old]:
                self._counts[block] = counts
            else:
                self._counts.pop(block, None)
        run.tiers = tiers

    def _held(self, block: int) -> int:
        """Return the tiers that a block is in, as bits."""
        counts = self._counts.get(block, 0)
        return (counts & 0xFFFF > 0) | (counts >> 16 & 0xFFFF > 0) << 1 | (counts >> 32 > 0) << 2

    def _place(self, state: ExtentState) -> _Run | None:
        """Take over the state of an extent. None: it hangs below something unknown."""
        known = self._runs.get(state.id)
        above = self._runs.get(state.above) if state.above is not None else None
        if known is not None:  # its rows and what is before them stay the same, whatever holds these
            if above is not None:
                above.below[state.id] = None
            known.state = state
            return known
        if above is None and state.start:
            return None
        run = self._new(state, above)
        if above is not None:
            above.below[state.id] = None
        self._runs[state.id] = run
        return run

    def _new(self, state: ExtentState, above: _Run | None) -> _Run:
        begin = state.start - state.start % BLOCK_ROWS
        lead, before = b"", None
        if above is not None:
            lead = self._between(above, begin, state.start)
            before = self._with_row(above, begin - 1) if begin else None
        parent = before.hashes[begin // BLOCK_ROWS - 1 - before.start // BLOCK_ROWS] if before is not None else None
        same = before is not None and before.state.salt == state.salt
        run = _Run(state, lead, parent, "" if same else self.salt_tag(state.salt))
        run.hashes = tuple(self._chain(run))
        return run

    def salt_tag(self, salt: str) -> str:
        """Return what tells the blocks of a salt from others', and does not tell the salt."""
        if salt in ("", OPERATOR):
            return ""
        return hashlib.blake2b(salt.encode(), key=self._seed, digest_size=16).hexdigest()

    def _path(self, run: _Run, row: int = 0) -> Iterator[_Run]:
        """Go from a run up to the one with a row, as far as the path is known."""
        yield run
        while run.start > row and (above := self._runs.get(run.state.above or "")) is not None:
            run = above
            yield run

    def _with_row(self, run: _Run, row: int) -> _Run | None:
        """Find the run with a row of the path through `run`."""
        *_, last = self._path(run, row)
        return last if last.start <= row else None

    def _between(self, run: _Run, begin: int, end: int) -> bytes:
        """Return the tokens [begin, end) of a path that goes through `run` up to row `end`."""
        parts: list[bytes] = []
        for each in self._path(run, begin):
            start, at = max(begin, each.start), each.state.first - each.start
            parts.append(each.state.tokens[4 * (start + at) : 4 * (end + at)])
            end = start
        return b"".join(reversed(parts))

    def _chain(self, run: _Run) -> Iterator[int]:
        tokens, parent, salt = run.tokens, run.parent, run.salt
        for at in range(0, len(tokens) // 4 // BLOCK_ROWS * BLOCK_ROWS, BLOCK_ROWS):
            state = hashlib.blake2b(key=self._seed, digest_size=8)
            state.update(b"" if parent is None else parent.to_bytes(8, "big"))
            state.update(salt.encode())
            state.update(tokens[4 * at : 4 * (at + BLOCK_ROWS)])
            parent, salt = int.from_bytes(state.digest(), "big"), ""
            yield parent

    def _add_affected(self, run: _Run, affected: dict[ExtentId, _Run]) -> None:
        """Add a run, and those below whose first block begins in it."""
        stack = [run]
        while stack:
            run = stack.pop()
            affected[run.state.id] = run
            for name in run.below:
                child = self._runs.get(name)
                if child is not None and child.start % BLOCK_ROWS and name not in affected:
                    stack.append(child)

    def _tiers(self, run: _Run) -> Iterator[int]:
        """Compute the tiers of each block that ends in a run."""
        for number in range(len(run.hashes)):
            end = (run.start // BLOCK_ROWS + number + 1) * BLOCK_ROWS
            held = [run.state]
            if number == 0:
                held = [each.state for each in self._path(run, end - BLOCK_ROWS)]
            host, disk = all(state.host for state in held), all(state.disk for state in held)
            yield (end <= run.state.device_end) | (host << 1) | ((disk or not host) << 2)

    def _removed(self, before: dict[int, int]) -> Iterator[RemovedBlocks]:
        for bit, medium in enumerate(MEDIA):
            left = [block for block, tiers in before.items() if (tiers & ~self._held(block)) >> bit & 1]
            for at in range(0, len(left), MOST_BLOCKS):
                yield RemovedBlocks(medium, tuple(left[at : at + MOST_BLOCKS]))

    def _stored(self, run: _Run, before: dict[int, int]) -> Iterator[StoredBlocks]:
        # They are popped, since another run with the same block has nothing to add.
        come = [(n, self._held(b) & ~before.pop(b)) for n, b in enumerate(run.hashes) if b in before]
        found: list[tuple[int, int, Medium]] = []
        for bit, medium in enumerate(MEDIA):
            stretches = _stretches(n for n, tiers in come if tiers >> bit & 1)
            found += [(first, stop, medium) for first, stop in stretches]
        for first, stop, medium in sorted(found, key=lambda each: each[0]):  # none comes before its parent
            yield StoredBlocks(
                medium,
                run.hashes[first:stop],
                run.hashes[first - 1] if first else run.parent,
                run.salt if first == 0 else "",
                run.tokens[4 * BLOCK_ROWS * first : 4 * BLOCK_ROWS * stop],
            )


def _stretches(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Group ascending numbers that follow each other, at most MOST_BLOCKS at a time: [first, stop)."""
    first = stop = -1
    for number in numbers:
        if number != stop or stop - first == MOST_BLOCKS:
            if stop > first:
                yield first, stop
            first = number
        stop = number + 1
    if stop > first:
        yield first, stop


@dataclass(frozen=True, slots=True)
class ExtentState:
    """Where the rows of one extent lie, as far as matches go through them.

    The rows are `tokens` from byte 4 * `first` on, the first of which is row `start` of the path. `above`: the extent with
    the row before, None at the root. `device_end`: contexts on the device have the path's rows up to there.
    """

    id: ExtentId
    above: ExtentId | None
    salt: str
    tokens: bytes
    first: int
    start: int
    device_end: int
    host: bool
    disk: bool


@dataclass(frozen=True, slots=True)
class Changes:
    """What one step has changed: extents that left the index, then those that came or whose tiers changed, heads of paths
    first. `anew`: forget all that was known before."""

    gone: tuple[ExtentId, ...]
    states: tuple[ExtentState, ...]
    anew: bool = False


class ChangedExtents:
    """Collects changed extents. Rows that no prompt of a client matches by itself are left out: truncated and selected ones, and
    those that registered prefixes lead past."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._prefixes = cache.index.prefixes.version
        self._changed: dict[Extent, None] = {}
        self._known: dict[ExtentId, Extent] = {}
        cache.placement.candidates.watch = self._note
        cache.device.watch = self._note

    def take(self) -> Changes | None:
        """Return the changes since the last call; None without any. All is new where a prefix of the operator was registered, or is no
        more."""
        if self._prefixes != self._cache.index.prefixes.version:
            return self.everything()
        if not self._changed:
            return None
        changed, self._changed = self._changed, {}
        gone = tuple(each.id for each in changed if each.dead and self._known.get(each.id) is each)
        for name in gone:
            del self._known[name]
        return Changes(gone, self._states(changed))

    def everything(self) -> Changes:
        """Return the whole index."""
        self._changed.clear()
        self._known.clear()
        self._prefixes = self._cache.index.prefixes.version
        return Changes((), self._states(dict.fromkeys(self._cache.index.extents.values())), anew=True)

    def _note(self, extent: Extent) -> None:
        if extent.kind == "exact":
            self._changed[extent] = None

    def _states(self, extents: dict[Extent, None]) -> tuple[ExtentState, ...]:
        live = {each: None for each in extents if each.nodes and each.kind == "exact"}
        for extent in tuple(live):
            if extent.id not in self._known:  # it may have taken the place of others, which something hung below
                below = (child.extent for node in extent.nodes for child in node.children())
                live.update((child, None) for child in below if child is not None and child.kind == "exact")
        self._known.update((each.id, each) for each in live)
        states = map(self._state, sorted(live, key=lambda each: each.first_row + each.nodes[0].start))
        return tuple(state for state in states if state is not None)

    def _state(self, extent: Extent) -> ExtentState | None:
        """Return the state of the rows that prompts match; None without any."""
        first, stop = extent.nodes[0].start, self._cache.index.reach(extent) - extent.first_row
        if stop <= first:
            return None
        above = extent.above
        if above is None and extent.parent is not None:  # it hangs below a registered prefix of another tenant
            above = self._cache.index.extents.get(extent.parent)
        return ExtentState(
            extent.id,
            above.id if above is not None else None,
            extent.salt,
            extent.tokens if stop >= extent.rows else extent.tokens[: 4 * stop],
            first,
            extent.first_row + first,
            self._device_end(extent),
            extent.host == "ready",
            extent.disk == "ready",
        )

    def _device_end(self, extent: Extent) -> int:
        """Return the row up to which a context on the device has the path through an extent; its first row: none has."""
        most = 0
        for number in extent.contexts:
            context = self._cache.device.contexts[number]
            if not context.doomed:
                begin = extent.first_row
                rows = context.rows - begin
                most = max(most, common_rows(context.tokens, begin, extent.tokens, 0, min(rows, extent.rows)))
        return extent.first_row + most
