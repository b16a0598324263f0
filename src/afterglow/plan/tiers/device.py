"""The device tier: a budget of rows shared by running jobs' segments and the contexts kept of finished ones.

It knows sizes, token strings and which extents a context contains; not what computes on them, nor the other tiers.
Segments with equal beginnings have pages in common, which count once. Where layers with a sliding window hold only a context's last
rows, pages are of the other layers, and each segment counts its last rows by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from afterglow.plan.options import UNLIMITED, Capacity, SchedulerOptions
from afterglow.plan.prefix.extent import NONE, Extent, View, with_key, without_key
from afterglow.plan.prefix.index import Match
from afterglow.plan.prefix.tree import common_rows
from afterglow.plan.stats import Counters

GROWTH_BLOCKS = 4  # blocks by which a segment grows while there is room, to be one run of memory
MAX_CANDIDATES = 16  # contexts looked at per match; a popular prefix may be part of hundreds


class Lack(NamedTuple):
    """Rows [start, stop) that may not be on the device in layers with a sliding window: no query needed them there."""

    start: int
    stop: int

    def below(self, rows: int) -> Lack:
        """Return what the first `rows` rows lack."""
        return self if rows > self.start else WHOLE

    def usable(self, rows: int, window: int) -> int:
        """Return how many of the first `rows` rows queries may follow: what their windows show them has to be there."""
        return rows if rows - window + 1 >= self.stop else min(rows, self.start)


WHOLE = Lack(2**31, 0)


@dataclass(eq=False, slots=True)
class DeviceSegment:
    """Room for `capacity` rows of a context. `pages`: the numbers of its pages, where segments share them; `recent`: what its last rows count
    besides, in layers that hold no others."""

    capacity: int = 0
    pages: list[int] = field(default_factory=list)
    recent: int = 0


@dataclass(eq=False, slots=True)
class Context:
    """Rows that a job has left on the device. The first `rows` may be used, if the index knows them too."""

    id: int
    salt: str
    tokens: bytes
    rows: int
    segment: DeviceSegment
    lacks: Lack = WHOLE
    extents: dict[Extent, None] = field(default_factory=dict)
    pinned: bool = False  # copied from in the current step
    doomed: bool = False  # to be freed as soon as it is not pinned
    registered: bool = False  # a registered prefix, which is copied only and stays


class Device:
    """Segments and contexts against one budget."""

    def __init__(self, capacity: Capacity, counters: Counters, options: SchedulerOptions | None = None) -> None:
        options = options or SchedulerOptions()
        self.window = options.sliding_window
        self.held = capacity.held
        if self.held.step(UNLIMITED, self.window) < 1:
            raise ValueError(f"a window of {self.window} rows does not fit the {self.held.most} that its layers hold")
        self.shares = options.shared_pages
        self.block = capacity.block_rows
        self.budget = capacity.device_rows // self.block * self.block
        # Memory is counted in rows of all layers; in rows of one, where they hold different rows.
        apart = self.shares and self.held.windowed > 0
        self._layers = self.held.layers if apart else 1
        self._whole = self.held.layers - self.held.windowed if apart else 1  # of these, layers that hold all rows
        self.most = self.held.longest(self.budget) // self.block * self.block  # rows of a context that has it all
        self._used = 0
        self.contexts: dict[int, Context] = {}  # least recently used first
        self.frees: list[int] = []
        self.longest = min(options.max_model_len, self.most)  # rows of the longest context that any job may come to
        self.watch: Callable[[Extent], None] | None = None  # is told of each extent whose contexts have changed
        self._counters = counters
        self._last_id = 0
        self._users: dict[int, int] = {}  # of each page, how many segments have it
        self._last_page = 0

    @property
    def used(self) -> int:
        """Return the rows of all layers that take as much memory as all segments."""
        return -(-self._used // self._layers)

    def reserve(self, segment: DeviceSegment, rows: int, keep: Context | None = None) -> bool:
        """Give a segment room for `rows` rows, freeing contexts (never `keep`) for it. All or nothing."""
        if not self._make_room(self._more(segment, rows), keep):
            return False
        self._extend(segment, rows)
        return True

    def fork(self, source: DeviceSegment, first: int, rows: int, keep: Context | None) -> DeviceSegment | None:
        """Make a segment with room for `rows` rows that begins with the first `first` of another. Only whole pages are shared."""
        made = DeviceSegment()
        if self.shares:
            made.pages = source.pages[: first // self.block]
            made.capacity = len(made.pages) * self.block
        if not self._make_room(self._more(made, rows), keep):
            return None
        for page in made.pages:
            self._users[page] += 1
        self._extend(made, rows)
        return made

    def take_over(self, context: Context, first: int, rows: int) -> DeviceSegment | None:
        """Let a job go on in a context's segment, with the first `first` of its rows and room for `rows`. The context is gone then."""
        if not self.shares:
            done = self.reserve(context.segment, max(rows, context.segment.capacity), context)
            made = context.segment if done else None
        else:
            kept = context.segment.pages[: first // self.block]
            rest = context.segment.pages[len(kept) :]
            made = None
            shortened = DeviceSegment(len(kept) * self.block, kept, context.segment.recent)
            if self._make_room(self._more(shortened, rows), context, rest):
                self._drop(rest)
                self._extend(shortened, rows)
                made = shortened
        if made is not None:
            context.segment = made
            self._detach(context)
        return made

    def has_room(self, segment: DeviceSegment, rows: int) -> bool:
        """Return whether a segment may have `rows` rows beside all contexts."""
        return self._used + self._more(segment, rows) <= self.budget * self._layers

    def release(self, segment: DeviceSegment) -> None:
        """Count a segment no more, except for pages that others have too."""
        if self.shares:
            self._drop(segment.pages)
            self._used -= segment.recent
        else:
            self._used -= self.held.cost(segment.capacity)

    def trim(self, segment: DeviceSegment, rows: int) -> None:
        """Count only the pages of the first `rows` rows."""
        if self.shares:
            count = -(-rows // self.block)
            self._drop(segment.pages[count:])
            del segment.pages[count:]
            segment.capacity = min(segment.capacity, count * self.block)
            self._used -= segment.recent - self._recent(segment.capacity)
            segment.recent = self._recent(segment.capacity)

    def _more(self, segment: DeviceSegment, rows: int) -> int:
        """Return what more room takes: for `rows` rows in all."""
        if self.shares:
            return (rows - segment.capacity) * self._whole + self._recent(rows) - segment.recent
        return self.held.cost(rows) - self.held.cost(segment.capacity)

    def _recent(self, rows: int) -> int:
        """Return what a segment with room for `rows` rows takes in layers that hold the last rows alone."""
        return (self._layers - self._whole) * min(rows, self.held.most)

    def _extend(self, segment: DeviceSegment, rows: int) -> None:
        self._used += self._more(segment, rows)
        segment.capacity = rows
        if self.shares:
            segment.recent = self._recent(rows)
        while self.shares and len(segment.pages) * self.block < rows:
            self._last_page += 1
            segment.pages.append(self._last_page)
            self._users[self._last_page] = 1

    def _drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                self._used -= self.block * self._whole

    def _make_room(self, more: int, keep: Context | None, dropped: Sequence[int] = ()) -> bool:
        """Free contexts, the least recently used ones first, until there is room for `more` once a user of some pages has `dropped` them;
        none if that does not do."""
        left = {page: self._users[page] - 1 for page in dropped}  # users that pages have then
        page_size = self.block * self._whole
        short = self._used + more - self.budget * self._layers - page_size * list(left.values()).count(0)
        if short <= 0:
            return True
        victims: list[Context] = []
        for context in self.contexts.values():
            if short <= 0:
                break
            if context is keep or context.pinned or context.registered:
                continue
            victims.append(context)
            if not self.shares:
                short -= self.held.cost(context.segment.capacity)
            short -= context.segment.recent
            for page in context.segment.pages:
                left[page] = left.get(page, self._users[page]) - 1
                short -= page_size * (not left[page])
        if short > 0:
            return False
        for context in victims:
            gives = context.segment.recent > 0 or not all(left[page] for page in context.segment.pages)
            if self.shares and not gives:
                for page in context.segment.pages:
                    left[page] += 1
                continue
            self.free(context)
        return True

    def lacking(self, lacks: Lack, start: int, stop: int) -> Lack:
        """Return what a segment lacks once rows [start, stop) have been gathered for queries from row `stop` on."""
        before = stop - self.window + 1
        if not self.window or before <= start:
            return lacks
        return Lack(min(lacks.start, start), max(lacks.stop, before))

    def most_new(self, start: int) -> int:
        """Return how many rows a step may compute from row `start` on."""
        return self.held.step(start, self.window)

    def letting_go(self, lacks: Lack, stop: int) -> Lack:
        """Return what a segment lacks once rows before `stop` have been computed, as layers with a window hold the last rows."""
        first = self.held.first(stop)
        return Lack(0, max(lacks.stop, first)) if first else lacks

    def retain(self, salt: str, tokens: bytes, rows: int, segment: DeviceSegment, lacks: Lack = WHOLE) -> Context:
        """Make a running job's segment a context."""
        self._last_id += 1
        self.trim(segment, rows)
        context = Context(self._last_id, salt, tokens, rows, segment, lacks.below(rows))
        self.contexts[context.id] = context
        return context

    def contain(self, context: Context, extents: tuple[Extent, ...]) -> None:
        """Note that a context contains rows of these extents. Of a prefix under another salt it has rows of its own,
        which others are not to be given."""
        for extent in extents:
            if extent.salt != context.salt:
                continue
            context.extents[extent] = None
            extent.contexts = with_key(extent.contexts, context.id)
            self._changed(extent)

    def shorten(self, context: Context, rows: int) -> None:
        """Let no more than the first `rows` rows of a context be used."""
        context.rows = rows
        for extent in context.extents:
            self._changed(extent)

    def hold(self, context: Context) -> None:
        """Keep a context whatever happens, if there is always room for the longest context of a job beside all that are
        kept so, and it is not kept already."""
        kept = [other for other in self.contexts.values() if other.registered]
        room = self.budget - sum(self.held.cost(other.segment.capacity) for other in kept)
        room -= self.held.cost((self.longest // self.block + 1) * self.block)
        there = any(other.salt == context.salt and other.tokens == context.tokens for other in kept)
        context.registered = self.held.cost(context.segment.capacity) <= room and not there

    def let_go(self, salt: str, tokens: bytes) -> None:
        """Keep the context with exactly these tokens no longer than others."""
        for context in self.contexts.values():
            context.registered = context.registered and not (context.salt == salt and context.tokens == tokens)

    def free(self, context: Context) -> None:
        """Forget a context: at once, or after the step that copies from it."""
        if context.pinned:
            context.doomed = True
            for extent in context.extents:
                self._changed(extent)
            return
        self._detach(context)
        self.release(context.segment)
        self.frees.append(context.id)
        self._counters.evicted_device += 1

    def copy_from(self, context: Context) -> None:
        """Let a job start with a copy of a context, which must outlive the step."""
        context.pinned = True
        self.contexts[context.id] = self.contexts.pop(context.id)

    def unpin(self) -> bool:
        """Unpin contexts after a step. Was any pinned?"""
        pinned = [context for context in self.contexts.values() if context.pinned]
        for context in pinned:
            context.pinned = False
            if context.doomed:
                self.free(context)
        return bool(pinned)

    def forget(self, extent: Extent) -> None:
        """Free the contexts that contain an extent that has left the index."""
        for number in list(extent.contexts):
            self.free(self.contexts[number])

    def replace(self, parts: Sequence[Extent], whole: Extent) -> None:
        """Let contexts that contain rows of `parts` contain rows of `whole`, which has come in their place."""
        for number in sorted({number for part in parts for number in part.contexts}):
            extents = self.contexts[number].extents
            for part in parts:
                extents.pop(part, None)
            extents[whole] = None
            whole.contexts = with_key(whole.contexts, number)
        for part in parts:
            part.contexts = NONE

    def best(self, tokens: bytes, match: Match) -> tuple[Context | None, int]:
        """Find the context that has most of a match's rows, and how many; of equals the more recent one."""
        view: View
        end = limit = match.rows
        salt = match.views[-1].extent.salt if match.views else ""
        for view in reversed(match.views):
            if view.extent.salt != salt:  # a prefix of others', of whose contexts nothing else is wanted
                salt, limit = view.extent.salt, end
            end -= view.stop - view.start
            found: Context | None = None
            rows = 0
            for number in list(view.extent.contexts)[: -MAX_CANDIDATES - 1 : -1]:
                context = self.contexts[number]
                same = common_rows(context.tokens, 0, tokens, 0, min(context.rows, limit))
                same = context.lacks.usable(same, self.window)
                if same > rows and not context.doomed:
                    found, rows = context, same
                if rows == limit:
                    break
            if found is not None:
                return found, rows
        return None, 0

    def check(self, running: Sequence[DeviceSegment]) -> None:
        """Segments of jobs (`running`) + contexts = used <= budget; contexts <-> extents."""
        segments = [*running, *(context.segment for context in self.contexts.values())]
        if self.shares:
            users = Counter(page for segment in segments for page in segment.pages)
            assert users == self._users
            assert self._used == len(users) * self.block * self._whole + sum(segment.recent for segment in segments)
            assert all(segment.recent == self._recent(segment.capacity) for segment in segments)
            assert all(segment.capacity == len(segment.pages) * self.block for segment in segments)
        else:
            assert self._used == sum(self.held.cost(segment.capacity) for segment in segments)
        assert self.used <= self.budget
        for context in self.contexts.values():
            assert 0 < context.rows <= context.segment.capacity
            assert context.rows * 4 <= len(context.tokens)
            for extent in context.extents:
                assert context.id in extent.contexts
                assert context.doomed or not extent.dead

    def _detach(self, context: Context) -> None:
        del self.contexts[context.id]
        for extent in context.extents:
            extent.contexts = without_key(extent.contexts, context.id)
            self._changed(extent)

    def _changed(self, extent: Extent) -> None:
        if self.watch is not None:
            self.watch(extent)
