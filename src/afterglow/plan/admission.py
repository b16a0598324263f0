"""How a waiting job comes to the device: what of its prompt is cached, where, and what must be moved first.

It knows the index, the tiers and the other jobs' promises; not the batch, not the step. An attempt either joins or says
what the job waits for, and may be repeated at any time: each starts from the index anew, so that whatever has
vanished, been damaged or been added meanwhile is accounted for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import takewhile
from math import inf
from typing import Literal

from afterglow.plan.compaction import Compaction
from afterglow.plan.cost import Cost
from afterglow.plan.device import GROWTH, Context, Device
from afterglow.plan.extent import Capacity, View
from afterglow.plan.ghosts import Ghosts, Reason
from afterglow.plan.index import NO_MATCH, Index, Match, common_rows
from afterglow.plan.jobs import Job, Stage, Wait
from afterglow.plan.placement import Placement
from afterglow.plan.stats import Counters
from afterglow.plan.step import Admit, Gather, Selectable

Source = Literal["auto", "load", "recompute"]

UNKNOWN_HOLD_S = 0.05  # how long to wait for slots before it is known what computing takes
LEAST_ASKING = 16  # last tokens of a prompt that are computed, to find out what is important to them
MAX_ROUNDS = 4  # evictions that a job waits for before it recomputes what could not be loaded


class Admission:
    """Attempts to admit jobs."""

    def __init__(
        self,
        capacity: Capacity,
        index: Index,
        placement: Placement,
        device: Device,
        counters: Counters,
        cost: Cost,
        compaction: Compaction,
        ghosts: Ghosts,
        promising: Callable[[], Iterable[Job]],
        source: Source = "auto",
        whole: bool = False,
    ) -> None:
        self._capacity = capacity
        self._index = index
        self._placement = placement
        self._device = device
        self._counters = counters
        self._cost = cost
        self._compaction = compaction
        self._ghosts = ghosts
        self._promising = promising
        self.source = source
        self.whole = whole  # are all rows to be there before a job joins (a baseline)?

    def attempt(self, job: Job, now: float, idle: bool, may_join: bool) -> Admit | Wait:
        """Admit the job if nothing stands against it. `idle`: nothing runs, so a step may wait for its loads."""
        job.again_at = now
        if job.origin is not None and (wait := self._revive(job, now)) is not None:
            return wait
        tokens = bytes(job.tokens)
        match = self._match(job, tokens)
        if job.spec.read and job.cut is None and self._is_promised(job, tokens, match.rows):
            self._counters.waits_prefix += not job.waited
            job.waited = True
            return Wait.PREFIX
        if job.spec.selects and match.rows and job.length > LEAST_ASKING and not job.generated:
            return self._select(job, match, may_join, now)
        context, device_rows = self._device.best(job.spec.salt, tokens, match)
        guarded = dict.fromkeys([*(context.extents if context is not None else ()), *(v.extent for v in match.views)])
        for extent in guarded:  # making room must cost neither the context that was just chosen nor what was matched
            extent.users += 1
        views = _beyond(match, device_rows)
        kept = [v for v in self._choose(job, views, device_rows, now) if not self._placement.avoids(v.extent, now)]
        self._repin(job, kept)
        obtained = self._obtain(job, kept, now)
        room = obtained is None or not may_join or self.may_save(job, match.rows, job.length, now)
        for extent in guarded:
            extent.users -= 1
        if obtained is None:
            return Wait.SLOTS
        if len(obtained) < len(kept):  # the rest cannot be had, and what lies beyond it is of no use then
            views = views[: views.index(kept[len(obtained)])]
        loading = [view.extent for view in obtained if view.extent.host == "loading"]
        job.loads.update(dict.fromkeys(loading))
        stages = _stages(views, obtained, device_rows)
        if job.patient and loading:
            self._placement.open_gates_of(loading)
            job.again_at = inf
            return Wait.LOADS
        if not idle and not self.may_begin(job, stages[0], now):
            job.again_at = self._begins_at(job, stages[0], now)
            return Wait.LOADS
        if not may_join:
            return Wait.TURN
        if not room:
            return Wait.SAVES
        take = self._reserve(job, context, device_rows)
        if take is None:
            return Wait.DEVICE
        return self._join(job, match, context, take, device_rows, views, obtained, stages, now)

    def _select(self, job: Job, match: Match, may_join: bool, now: float) -> Admit | Wait:
        """A job that takes what matters of its prefix from wherever it is: nothing of it is loaded as a whole (SPEC §IV)."""

        def readable(view: View) -> bool:
            extent = view.extent
            return extent.host == "ready" or (extent.disk == "ready" and not self._placement.avoids(extent, now))

        # A prompt that is known nearly to its end has to ask with some of its tokens all the same.
        views = list(takewhile(readable, _before(match, job.length - LEAST_ASKING)))
        if not may_join:
            return Wait.TURN
        if self._reserve(job, None, 0) is None:
            return Wait.DEVICE
        self._repin(job, views)
        job.loads = {view.extent: None for view in views if view.extent.host != "ready"}
        rows = sum(view.stop - view.start for view in views)
        admit = self._join(job, match, None, False, 0, views, views, [Stage((), rows, None)], now)
        job.approximate, job.saving = bool(views), job.saving and not views
        found = [
            Selectable(v.extent.id, v.extent.rows, v.start, v.stop, v.extent.slots if v.extent.host == "ready" else ())
            for v in views
        ]
        registered = self._index.prefixes.before(job.spec.salt, job.tokens)
        exact = min(rows, registered.rows) if registered is not None else 0
        return replace(admit, selectable=tuple(found), exact=exact)

    def _revive(self, job: Job, now: float) -> Wait | None:
        """Bring what survived a truncation to where the job looks for it. None: done, or not to be done."""
        origin = job.origin
        assert origin is not None
        if job.copies:
            if self._compaction.under_way(job.copies):
                job.again_at = inf
                return Wait.LOADS
            self._revived(job)
            return None
        surviving = self._compaction.surviving(origin.salt, origin.tokens, origin.kept)
        views = list(takewhile(lambda view: not self._placement.avoids(view.extent, now), surviving))
        rows = sum(view.stop - view.start for view in views)
        pays = job.spec.read and rows > self._match(job, bytes(job.tokens)).rows
        if pays and not self._pays(views, rows, now):
            self._probe(views, now)
            pays = False
        if not pays:
            self._revived(job)
            return None
        self._repin(job, views)
        obtained = self._obtain(job, views, now)
        if obtained is None:
            return Wait.SLOTS
        job.loads.update(dict.fromkeys(view.extent for view in obtained if view.extent.host == "loading"))
        if any(view.extent.host == "loading" for view in obtained):
            self._placement.open_gates_of(job.pins)  # a copy needs all layers
            job.again_at = inf
            return Wait.LOADS
        job.carried = sum(view.stop - view.start for view in obtained if view.extent in job.loads)
        job.copies = self._compaction.begin(job.spec, bytes(job.tokens), obtained, now)
        if job.copies:
            job.again_at = inf
            return Wait.LOADS
        if obtained and self._placement.relief and job.rounds < MAX_ROUNDS:
            job.rounds += 1
            return Wait.SLOTS
        self._revived(job)
        return None

    def _revived(self, job: Job) -> None:
        job.origin, job.copies, job.cut = None, [], None
        self.unpin(job)

    def _pays(self, views: list[View], rows: int, now: float) -> bool:
        """Is loading and copying them faster than computing what remains of the prompt from its first token?"""
        if self.source != "auto" or not self._cost.known:
            return self.source != "recompute"
        extents = dict.fromkeys(view.extent for view in views)  # of a scattered list, many views are of one extent
        sizes = [extent.file_bytes for extent in extents if extent.host == "absent"]
        return self._cost.loads(sizes, now) <= self._cost.compute(rows, 0)

    def may_begin(self, job: Job, stage: Stage, now: float) -> bool:
        """Beside running decodes: are the rows of a stage there, or so soon that nobody has to wait for them?"""
        if self._placement.read_buffer is not None:
            return True  # the loads go on only when the job has joined
        under_way = [move for move in stage.loads if self._placement.is_under_way(move)]
        if not under_way:
            return True
        if self.whole:
            return False
        stop = stage.stop if stage.stop is not None else job.length
        computing = self._cost.compute(stop - stage.start, stage.start)
        return self._cost.known and self._cost.fits(*self._cost.coming(under_way, (), now), computing)

    def _begins_at(self, job: Job, stage: Stage, now: float) -> float:
        """When a stage may begin that may not now, as far as that depends on time alone."""
        under_way = [move for move in stage.loads if self._placement.is_under_way(move)]
        stop = stage.stop if stage.stop is not None else job.length
        return self._cost.fits_at(under_way, self._cost.compute(stop - stage.start, stage.start), now)

    def _match(self, job: Job, tokens: bytes) -> Match:
        """What is known of the tokens. The last one has to be computed in any case: there is no other way to logits."""
        if not job.spec.read:
            return NO_MATCH
        last = len(tokens) // 4 - 1
        return self._index.match(job.spec.salt, tokens[: 4 * min(last, job.cut if job.cut is not None else last)])

    def _is_promised(self, job: Job, tokens: bytes, matched: int) -> bool:
        """Will another job put more of these tokens into the index, so that waiting pays?"""
        limit = len(tokens) // 4 - 1
        for other in self._promising():
            if other.spec.salt != job.spec.salt or other.tokens[:4] != tokens[:4]:
                continue  # nearly all of them
            rows = other.promised
            if rows > matched:
                same = min(common_rows(other.tokens, 0, tokens, 0, rows), limit)
                # A prefill takes a while; rows that have left the device are about to be saved: any number is worth it.
                least = self._capacity.block_rows if other.running else 1
                if same - matched >= least or matched < same == limit:
                    return True
        return False

    def _repin(self, job: Job, views: list[View]) -> None:
        """Pin what the job is about to gather, then let go of what it was about to gather before."""
        before, job.pins = job.pins, [view.extent for view in views]
        for extent in job.pins:
            self._placement.pin(extent)
        for extent in before:
            self._placement.unpin(extent)

    def unpin(self, job: Job) -> None:
        """The job has gathered its rows, or never will."""
        self._repin(job, [])

    def may_save(self, job: Job, start: int, stop: int, now: float) -> bool:
        """Back-pressure (A7): are there slots for rows [start, stop), or is it not worth waiting for them?

        Rows that are not saved are computed again next turn: a job waits for slots that are being freed for at most as
        long as that takes.
        """
        if not job.spec.write or start >= stop:
            return True
        need = min(self._capacity.blocks(stop - start) + 1, self._placement.pool.total // 2)
        if self._placement.room_for_rows(need, now) or not self._placement.relief:
            return True
        if job.held_since is None:
            job.held_since = now
            self._counters.holds += 1
        return now >= self.deadline(job, start, stop)

    def deadline(self, job: Job, start: int, stop: int) -> float:
        """Until when a job that is held waits for slots."""
        since = job.held_since if job.held_since is not None else 0.0
        return since + (self._cost.compute(stop - start, start) if self._cost.known else UNKNOWN_HOLD_S)

    def _choose(self, job: Job, views: list[View], row: int, now: float) -> list[View]:
        """The views to be used, the others are recomputed: whichever is predicted to be done first.

        The tail of what is on disk is loaded while its head is recomputed: loaded rows need no recomputed ones. All of
        both are cases of it, and so is recomputing what is in host (spec A8, A10; design: splitting).
        """
        cold = [i for i, view in enumerate(views) if view.extent.host != "ready"]
        if self.source == "load" or not views or (self.source == "auto" and not self._cost.known):
            return views
        if self.source == "recompute":
            return []
        cost = self._cost
        starts, end = [], row
        for view in views:
            starts.append(end)
            end += view.stop - view.start
        final = cost.compute(job.length - end, end)
        gathering = cost.gather(end - row)
        flying = [views[i].extent.load for i in cold]
        reads = [cost.read(views[i].extent.file_bytes) for i in cold]
        best, recomputed, head = float("inf"), 0, 0.0
        for split in range(len(cold) + 1):
            if split:  # the view before the split is recomputed too
                i = cold[split - 1]
                rows = views[i].stop - views[i].start
                follows = split > 1 and cold[split - 2] == i - 1
                head += cost.compute(rows, starts[i]) - (cost.compute(0, 0) if follows else 0.0) - cost.gather(rows)
            under_way = [move for move in flying[split:] if move is not None]
            others = [seconds for seconds, move in zip(reads[split:], flying[split:], strict=True) if move is None]
            first, last = cost.coming(under_way, others, now)
            total = max(max(head + gathering, first) + final, last + final / cost.layers)
            if total < best:
                best, recomputed = total, split
        if cost.compute(job.length - row, row) < best:
            return []
        gone = set(cold[:recomputed])
        return [view for i, view in enumerate(views) if i not in gone]

    def _obtain(self, job: Job, views: list[View], now: float) -> list[View] | None:
        """The views whose rows are in host or on their way to it; starts the loads. None: wait for slots."""
        for i, view in enumerate(views):
            self._placement.wanted(view.extent)
            if view.extent.host == "absent" and not self._placement.load(view.extent, now, job.key):
                if self._placement.relief and job.rounds < MAX_ROUNDS:
                    job.rounds += 1
                    return None
                job.cut = view.extent.first_row + view.start
                self._counters.cut_loads += 1
                self._repin(job, views[:i])
                return views[:i]
        return views

    def _reserve(self, job: Job, context: Context | None, device_rows: int) -> bool | None:
        """Count the job's segment against the device's budget: True, it takes the context over; None, no room.

        With room to grow, because growing may mean copying; with less of it where that would keep the job waiting.
        """
        found = None
        for blocks in (GROWTH, 1):
            growth = max(min(job.remaining, blocks * self._capacity.block_rows), 1)
            capacity = min(self._capacity.round_up(job.length + growth), self._device.budget)
            found = found if found is not None else self._reserve_rows(job, context, device_rows, capacity)
        return found

    def _reserve_rows(self, job: Job, context: Context | None, device_rows: int, capacity: int) -> bool | None:
        if context is None:
            return self._give(job, capacity, 0, None, False)
        own = context.salt == job.spec.salt and not (context.pinned or context.held)
        wanted = own and 2 * device_rows >= context.rows
        if not wanted and self._give(job, capacity, 0, context, False) is not None:
            return False
        if context.pinned or context.held:
            return None
        return self._give(job, max(capacity, context.capacity), context.capacity, context, True)

    def _give(self, job: Job, capacity: int, counted: int, keep: Context | None, take: bool) -> bool | None:
        """`take`, if the job can have a segment of `capacity` rows, `counted` of which are counted already."""
        if not self._device.reserve(capacity - counted, keep):
            return None
        job.capacity = capacity
        return take

    def _join(
        self,
        job: Job,
        match: Match,
        context: Context | None,
        take: bool,
        device_rows: int,
        views: list[View],
        obtained: list[View],
        stages: list[Stage],
        now: float,
    ) -> Admit:
        if context is not None:
            if take:
                self._device.take_over(context)
            else:
                self._device.copy_from(context)
        rows = device_rows + sum(view.stop - view.start for view in views)
        gathered = sum(view.stop - view.start for view in obtained)
        held = [*_before(match, device_rows), *views]
        for extent in dict.fromkeys(view.extent for view in held):
            self._placement.touch(extent, now, job.spec.ttl, job.spec.volatile)
            if extent not in job.held:
                job.held[extent] = None
                extent.users += 1
        disk = sum(view.stop - view.start for view in obtained if view.extent in job.loads)
        disk += min(job.carried, gathered - disk)
        job.hits = (device_rows, gathered - disk, disk)
        if job.cut is not None:  # for want of slots the match was cut short; what lies beyond is cached all the same
            job.cut = None
            match = self._match(job, bytes(job.tokens))
        self._counters.recomputed += match.rows - device_rows - gathered
        why: Reason = "cold"
        if job.spec.read and match.rows < job.length - 1:
            why = self._ghosts.why(job.spec.salt, bytes(job.tokens), match, self._index)
        job.missed = (why, job.length - match.rows)
        job.rows, job.covered, job.held_since = device_rows, rows, None
        job.stages = stages
        job.target = job.length
        job.saving = job.spec.write
        job.approximate = job.lingering = False
        job.state = "prefilling"
        job.loads, job.cut, job.rounds, job.tried, job.patient = {}, None, 0, -1, False
        self._placement.urge(job.pins)
        if len(obtained) < len(views):
            self._probe(views, now)
        return Admit(context.id if context is not None else None, take, device_rows)

    def _probe(self, views: list[View], now: float) -> None:
        """Some of these are computed although they are on disk. Now and then the shortest of them is read all the same,
        beside whatever is computed and for a part of the time that this takes: else a tier that was slow once would be
        slow for ever."""
        cold = [view.extent for view in views if view.extent.host == "absent" and view.extent.disk == "ready"]
        if self.source != "auto" or not self._cost.known or not cold:
            return
        extent = min(cold, key=lambda each: (each.file_bytes, -each.first_row))
        most = self._cost.probe(extent.rows, extent.first_row, now)
        if most is not None:
            self._placement.probe(extent, most, now)


def _stages(views: list[View], kept: list[View], row: int) -> list[Stage]:
    """From views, of which those that are not `kept` are recomputed, to the parts of the prefill."""
    stages: list[Stage] = []
    gathers: list[Gather] = []
    gap: int | None = None  # where the rows begin that are recomputed now
    wanted = iter(kept)
    following = next(wanted, None)
    for view in views:
        if view is following:
            if gap is not None:
                stages.append(Stage(tuple(gathers), gap, row))
                gathers, gap = [], None
            extent = view.extent
            gathers.append(Gather(extent.id, view.start, view.stop, extent.slots, extent.load))
            following = next(wanted, None)
        elif gap is None:
            gap = row
        row += view.stop - view.start
    return [*stages, Stage(tuple(gathers), gap if gap is not None else row, None)]


def _before(match: Match, rows: int) -> list[View]:
    """The first `rows` rows of a match."""
    found = []
    for view in match.views:
        if rows <= 0:
            break
        found.append(View(view.extent, view.start, min(view.stop, view.start + rows)))
        rows -= view.stop - view.start
    return found


def _beyond(match: Match, rows: int) -> list[View]:
    """A match without its first `rows` rows."""
    found = []
    for view in match.views:
        skip = min(rows, view.stop - view.start)
        rows -= skip
        if view.start + skip < view.stop:
            found.append(View(view.extent, view.start + skip, view.stop))
    return found
