"""How a waiting job comes to the device: what of its prompt is cached, where, and what must be moved first.

It knows the index, the tiers and the other jobs' promises; not the batch, not the step. An attempt either joins or says
what the job waits for, and may be repeated at any time: each starts from the index anew, so that whatever has
vanished, been damaged or been added meanwhile is accounted for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import takewhile
from math import inf

from afterglow.plan.batching.batch import Batch
from afterglow.plan.batching.compaction import Compaction
from afterglow.plan.batching.job import Job, Stage, Wait
from afterglow.plan.batching.load_or_recompute import LoadOrRecompute, SeenRows, stages_of
from afterglow.plan.cache import Cache
from afterglow.plan.options import UNLIMITED, SchedulerOptions
from afterglow.plan.prefix.extent import View
from afterglow.plan.prefix.ghosts import Reason
from afterglow.plan.prefix.index import NO_MATCH, Match
from afterglow.plan.prefix.salts import client_salt
from afterglow.plan.prefix.tree import common_rows
from afterglow.plan.step import Admit, Selectable
from afterglow.plan.tiers.device import GROWTH_BLOCKS, WHOLE, Context, DeviceSegment

UNKNOWN_HOLD_S = 0.05  # how long to wait for slots before it is known what computing takes
MIN_ASKING_ROWS = 16  # last tokens of a prompt that are computed, to find out which rows are important to them
MAX_ROUNDS = 4  # evictions that a job waits for before it recomputes rows that could not be loaded


class Admission:
    """Attempts to admit jobs."""

    def __init__(self, cache: Cache, batch: Batch, compaction: Compaction, options: SchedulerOptions) -> None:
        self.compaction = compaction
        self.seen = SeenRows(cache)
        self.decision = LoadOrRecompute(cache, self.seen, options)
        self._cache = cache
        self._batch = batch
        self._chunked = options.prefill_chunk > 0  # then no job leaves the device in a step after another has joined

    def attempt(self, job: Job, now: float, idle: bool, may_join: bool) -> Admit | Wait:
        """Admit the job if nothing stands against it. `idle`: nothing runs, so a step may wait for its loads."""
        job.again_at = now
        if job.origin is not None and (wait := self._revive(job, now)) is not None:
            return wait
        tokens = bytes(job.tokens)
        match = self.match(job, tokens, job.spec.salt)
        if job.spec.read and job.cut is None and self.is_promised(job, tokens, match.rows):
            self._cache.counters.waits_prefix += not job.waited
            job.waited = True
            return Wait.PREFIX
        context, fellow, device_rows = self.on_device(job, tokens, match)
        if job.spec.selects and match.rows and job.length > MIN_ASKING_ROWS and not job.generated:
            wide = self.match(job, tokens, self._cache.selecting_salt(job.spec))
            exact, selected = (beyond(each, device_rows) for each in (match, wide))
            if self.decision.selecting_pays(job, exact, selected, device_rows, now):
                return self._select(job, wide, may_join, now)
        guarded = dict.fromkeys([*(context.extents if context is not None else ()), *(v.extent for v in match.views)])
        for extent in guarded:  # making room must cost neither the chosen context nor the match
            extent.ref_count += 1
        views = beyond(match, device_rows)
        kept = [
            v
            for v in self.decision.choose(job, views, device_rows, now)
            if not self._cache.loading.avoids(v.extent, now)
        ]
        kept = self.seen.choose(views, kept, device_rows, partial(self.seen.obtainable, mine=list(job.pins)))
        self._batch.pin(job, kept)
        firsts, brought = (self.seen.firsts(views, kept, device_rows, forks=forks) for forks in (False, True))
        obtained = self._obtain(job, kept, firsts, brought, now, device_rows)
        room = obtained is None or not may_join or self.may_save(job, match.rows, job.length, now)
        for extent in guarded:
            extent.ref_count -= 1
        if obtained is None:
            return Wait.SLOTS
        if len(obtained) < len(kept):  # the rest cannot be had, and what lies beyond it is of no use then
            views = views[: views.index(kept[len(obtained)])]
        obtained = self.seen.choose(views, obtained, device_rows, View.shows)
        loading = [view.extent for view in obtained if view.extent.host == "loading"]
        for extent in loading:
            job.loads.setdefault(extent, self._cache.loading.is_far(extent))
        stages = stages_of(views, obtained, device_rows)
        if job.patient and loading:
            self._cache.loading.open_gates_of(loading)
            job.again_at = inf
            return Wait.LOADS
        if not idle and not self.decision.may_begin(job, stages[0], now):
            job.again_at = self.decision.begins_at(job, stages[0], now)
            return Wait.LOADS
        if not may_join:
            return Wait.TURN
        if not room:
            return Wait.SAVES
        take = self._reserve(job, context, fellow, device_rows)
        if take is None:
            return Wait.DEVICE
        left = self._let_go(job, match, views, obtained, now) if len(obtained) < len(views) else 0
        if left:
            match = Match(match.views[:-left], match.rows - sum(view.stop - view.start for view in views[-left:]))
            views = views[:-left]
            stages = stages_of(views, obtained, device_rows)
        admit = self._join(job, match, context, take, device_rows, views, obtained, stages, now)
        if fellow is None:
            return admit
        job.lacks = fellow.lacks.below(device_rows)
        return replace(admit, fellow=fellow.spec.job)

    def on_device(self, job: Job, tokens: bytes, match: Match) -> tuple[Context | None, Job | None, int]:
        """Find the context or the running job that has most of a match's rows on the device, and how many."""
        context, rows = self._cache.device.best(tokens, match)
        if job.head < UNLIMITED and self._cache.device.shares:
            # Its client's prompts that were not cut have the same rows before the first token that was left out.
            head = tokens[: 4 * min(job.head, match.rows)]
            other, most = self._cache.device.best(head, self._cache.match(client_salt(job.spec.salt), head))
            if most > rows:
                context, rows = other, most
        fellow, most = self._batch.fellow(job, tokens, match.rows if self._chunked else 0)
        return (None, fellow, most) if most > rows else (context, None, rows)

    def _let_go(self, job: Job, match: Match, views: list[View], obtained: list[View], now: float) -> int:
        """Forget the last rows of a match that are in the shared tier and are going to be computed here: else those computed would
        count as duplicates, and be kept nowhere. Returns how many views go."""
        recomputed = views[views.index(obtained[-1]) + 1 :] if obtained else views
        if not (job.spec.write and any(self._cache.loading.is_far(view.extent) for view in recomputed)):
            return 0
        self.decision.probe(recomputed, now)  # else the shared tier would count as slow for ever
        left = 0
        for view, matched in zip(reversed(recomputed), reversed(match.views), strict=False):
            extent, uses = view.extent, view.extent in job.uses  # it has run before: the loads have failed then
            extent.ref_count -= uses
            if view != matched or not self._cache.placement.let_go(extent):
                extent.ref_count += uses
                break
            job.uses.pop(extent, None)
            left += 1
        return left

    def _select(self, job: Job, match: Match, may_join: bool, now: float) -> Admit | Wait:
        """Admit a job that takes the important rows of its prefix from any tier: no extent is loaded as a whole (SPEC §IV)."""

        def readable(view: View) -> bool:
            extent = view.extent
            return extent.host == "ready" or (extent.disk == "ready" and not self._cache.loading.avoids(extent, now))

        # A prompt that is known nearly to its end has to ask with some of its tokens all the same.
        views = list(takewhile(readable, _before(match, job.length - MIN_ASKING_ROWS)))
        if not may_join:
            return Wait.TURN
        if self._reserve(job, None, None, 0) is None:
            return Wait.DEVICE
        self._cache.cost.selects()
        self._batch.pin(job, views)
        job.loads = {view.extent: False for view in views if view.extent.host != "ready"}
        rows = sum(view.stop - view.start for view in views)
        admit = self._join(job, match, None, False, 0, views, views, [Stage((), rows, None)], now)
        job.approximate, job.saving = bool(views), job.saving and not views
        job.on_disk = tuple(view.extent.file_bytes for view in views if view.extent.host != "ready")
        found = [
            Selectable(v.extent.id, v.extent.rows, v.start, v.stop, v.extent.slots if v.extent.host == "ready" else ())
            for v in views
        ]
        registered = self._cache.registered_prefix(job.spec.salt, job.tokens)
        exact = min(rows, registered.rows) if registered is not None else 0
        return replace(admit, selectable=tuple(found), exact=exact)

    def _revive(self, job: Job, now: float) -> Wait | None:
        """Bring the rows that survived a truncation to where the job looks for them. None: done, or not to be done."""
        origin = job.origin
        assert origin is not None
        if job.copies:
            if self.compaction.under_way(job.copies):
                job.again_at = inf
                return Wait.LOADS
            self._revived(job)
            return None
        surviving = self.compaction.surviving(origin.salt, origin.tokens, origin.kept)

        def obtainable(view: View) -> bool:
            return not self._cache.loading.avoids(view.extent, now) and self.seen.obtainable(view, 0, job.pins)

        views = list(takewhile(obtainable, surviving))
        rows = sum(view.stop - view.start for view in views)
        pays = job.spec.read and rows > self.match(job, bytes(job.tokens), job.spec.salt).rows
        if pays and not self.decision.pays(views, rows, now):
            self.decision.probe(views, now)
            pays = False
        if not pays:
            self._revived(job)
            return None
        self._batch.pin(job, views)
        all_rows = [0] * len(views)
        obtained = self._obtain(job, views, all_rows, all_rows, now)
        if obtained is None:
            return Wait.SLOTS
        for view in obtained:
            if view.extent.host == "loading":
                job.loads.setdefault(view.extent, self._cache.loading.is_far(view.extent))
        if any(view.extent.host == "loading" for view in obtained):
            self._cache.loading.open_gates_of(job.pins)  # a copy needs all layers
            job.again_at = inf
            return Wait.LOADS
        job.carried = sum(view.stop - view.start for view in obtained if view.extent in job.loads)
        job.copies = self.compaction.begin(job.spec, bytes(job.tokens), obtained, now)
        if job.copies:
            job.again_at = inf
            return Wait.LOADS
        if obtained and self._cache.relief and job.rounds < MAX_ROUNDS:
            job.rounds += 1
            return Wait.SLOTS
        self._revived(job)
        return None

    def _revived(self, job: Job) -> None:
        job.origin, job.copies, job.cut = None, [], None
        self._batch.unpin(job)

    def match(self, job: Job, tokens: bytes, salt: str) -> Match:
        """Match the tokens but the last one, which has to be computed in any case: there is no other way to logits."""
        if not job.spec.read:
            return NO_MATCH
        last = len(tokens) // 4 - 1
        return self._cache.match(salt, tokens[: 4 * min(last, job.cut if job.cut is not None else last)])

    def is_promised(self, job: Job, tokens: bytes, matched: int) -> bool:
        """Will another job put more of these tokens into the index, so that waiting pays?"""
        limit = len(tokens) // 4 - 1
        salts = (job.spec.salt, self._cache.selecting_salt(job.spec))
        for other in self._batch.promising():
            if other.salt not in salts or other.tokens[:4] != tokens[:4]:
                continue  # as nearly always
            rows = other.promised
            if rows > matched:
                same = min(common_rows(other.tokens, 0, tokens, 0, rows), limit)
                # A prefill takes a while; rows that have left the device are about to be saved: any number is worth it.
                least = self._cache.capacity.block_rows if other.running else 1
                if same - matched >= least or matched < same == limit:
                    return True
        return False

    def may_save(self, job: Job, start: int, stop: int, now: float) -> bool:
        """Back-pressure: are there slots for rows [start, stop), or is it not worth waiting for them?

        Rows that are not saved are computed again next turn: a job waits for slots that are being freed for at most as
        long as that takes.
        """
        if not job.spec.write or start >= stop:
            return True
        need = min(self._cache.capacity.blocks(stop - start) + 1, self._cache.host.pool.total // 2)
        if self._cache.host.room_for_rows(need, now) or not self._cache.relief:
            return True
        if job.blocked_since is None:
            job.blocked_since = now
            self._cache.counters.holds += 1
        return now >= self.deadline(job, start, stop)

    def deadline(self, job: Job, start: int, stop: int) -> float:
        """Return until when a blocked job waits for slots."""
        since = job.blocked_since if job.blocked_since is not None else 0.0
        return since + (self._cache.cost.compute(stop - start, start) if self._cache.cost.known else UNKNOWN_HOLD_S)

    def _obtain(
        self, job: Job, views: list[View], firsts: list[int], brought: list[int], now: float, row: int = 0
    ) -> list[View] | None:
        """Start loads; returns the views whose rows are in host or on their way to it. None: wait for slots.
        The device has the rows before `row`.

        Of an extent windows show the rows from `firsts` on, and a load brings those from `brought` on. Where a match may be cut short
        for want of slots, windows would show more: then loads bring all rows.
        """
        absent = dict.fromkeys(view.extent for view in views if view.extent.host == "absent")
        blocks = sum(self._cache.capacity.blocks(extent.rows) for extent in absent)  # others stay in their slots
        cached = sum(view.stop - view.start for view in views)
        ahead = self._cache.loading.buffered([view.extent for view in views], job.length - row - cached, row + cached)
        lean = any(brought) and self._cache.host.make_room(blocks, now, job.key)
        for i, (view, first, start) in enumerate(zip(views, firsts, brought, strict=True)):
            extent = view.extent
            self._cache.loading.used(extent)
            if extent.host == "partial" and not view.shows(first):
                self._cache.host.free(extent)
            skip = self.seen.skip(extent, start) if lean else 0
            if extent.host == "absent" and not self._cache.loading.load(extent, now, job.key, skip, ahead):
                if self._cache.relief and job.rounds < MAX_ROUNDS:
                    job.rounds += 1
                    return None
                job.cut = view.extent.first_row + view.start
                self._cache.counters.cut_loads += 1
                self._batch.pin(job, views[:i])
                return views[:i]
        return views

    def _reserve(self, job: Job, context: Context | None, fellow: Job | None, device_rows: int) -> bool | None:
        """Count the job's segment against the device's budget: True, it takes the context over; None, no room.

        With room to grow, in one run of memory; with less room where that would keep the job waiting.
        """
        found = None
        for blocks in (GROWTH_BLOCKS, 1):
            growth = max(min(job.remaining, blocks * self._cache.capacity.block_rows), 1)
            capacity = min(self._cache.capacity.round_up(job.length + growth), self._cache.device.most)
            found = found if found is not None else self._reserve_rows(job, context, fellow, device_rows, capacity)
        return found

    def _reserve_rows(
        self, job: Job, context: Context | None, fellow: Job | None, device_rows: int, capacity: int
    ) -> bool | None:
        device = self._cache.device
        if context is None:
            source = fellow.segment if fellow is not None else DeviceSegment()
            return self._give(job, device.fork(source, device_rows, capacity, None), False)
        own = context.salt == job.spec.salt and not (context.pinned or context.registered)
        wanted = own and 2 * device_rows >= context.rows
        if (
            not wanted
            and self._give(job, device.fork(context.segment, device_rows, capacity, context), False) is not None
        ):
            return False
        if context.pinned or context.registered:
            return None
        return self._give(job, device.take_over(context, device_rows, capacity), True)

    def _give(self, job: Job, segment: DeviceSegment | None, take: bool) -> bool | None:
        """Give a job its segment. Returns `take`; None: there is no room."""
        if segment is None:
            return None
        job.segment = segment
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
        job.lacks = context.lacks.below(device_rows) if context is not None else WHOLE
        if context is not None and not take:
            self._cache.device.copy_from(context)
        rows = device_rows + sum(view.stop - view.start for view in views)
        gathered = sum(view.stop - view.start for view in obtained)
        held = [*_before(match, device_rows), *views]
        for extent in dict.fromkeys(view.extent for view in held):
            self._cache.touch(extent, now, job.spec)
            if extent not in job.uses:
                job.uses[extent] = None
                extent.ref_count += 1
        self._cache.mark(held, job.spec.breakpoints, now)
        shared = sum(view.stop - view.start for view in obtained if job.loads.get(view.extent))
        disk = sum(view.stop - view.start for view in obtained if view.extent in job.loads) - shared
        disk += min(job.carried, gathered - disk - shared)
        job.hits = (device_rows, gathered - disk - shared, disk, shared)
        if job.cut is not None:  # for want of slots the match was cut short; what lies beyond is cached all the same
            job.cut = None
            match = self.match(job, bytes(job.tokens), job.spec.salt)
        self._cache.counters.recomputed += match.rows - device_rows - gathered
        why: Reason = "cold"
        if job.spec.read and match.rows < job.length - 1:
            why = self._cache.ghosts.why(job.spec.salt, bytes(job.tokens), match, self._cache.index)
        job.missed = (why, job.length - match.rows)
        job.rows, job.covered, job.blocked_since = device_rows, rows, None
        job.stages = stages
        job.target = job.length
        job.saving = job.spec.write
        job.approximate = job.lingering = False
        job.state = "prefilling"
        job.loads, job.cut, job.rounds, job.tried, job.patient = {}, None, 0, -1, False
        self._cache.loading.promote(job.pins)
        if len(obtained) < len(views):
            self.decision.probe(views, now)
        return Admit(context.id if context is not None else None, take, device_rows)


def _before(match: Match, rows: int) -> list[View]:
    """Return the views of the first `rows` rows of a match."""
    found = []
    for view in match.views:
        if rows <= 0:
            break
        found.append(View(view.extent, view.start, min(view.stop, view.start + rows)))
        rows -= view.stop - view.start
    return found


def beyond(match: Match, rows: int) -> list[View]:
    """Return the views of a match without its first `rows` rows."""
    found = []
    for view in match.views:
        skip = min(rows, view.stop - view.start)
        rows -= skip
        if view.start + skip < view.stop:
            found.append(View(view.extent, view.start + skip, view.stop))
    return found
