"""Rows on their way to extents.

Rows just computed become extents so: drafts are filled, sealed, saved and inserted into the index. A draft's life:

    tee (schedule) -> commit -> seal -> all rows answered -> inserted | duplicate | orphan | dead

Drafts of a job are resolved in row order, because each hangs below the one before it. Rows become matchable when
their step has been committed and their bytes are saved, never before. This knows host slots, the index and the jobs' token
strings, not what runs when.
"""

from __future__ import annotations

from afterglow.plan.batching.job import Draft, Job
from afterglow.plan.cache import Cache
from afterglow.plan.prefix.shared_prefixes import SharedPrefix
from afterglow.plan.step import Save, SaveDone

SLOTS_AHEAD = 4  # slots that a decoding job takes at a time while there is room; what it does not need it gives back


class Drafts:
    """All drafts that are not yet resolved."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._open: dict[int, Draft] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._open)

    def tee(self, job: Job, start: int, rows: int, now: float) -> tuple[Save, ...]:
        """Plan to save rows [start, start + rows) of a job, which are about to be computed."""
        saves: list[Save] = []
        borders = self._borders(job)
        while rows and job.saving:
            draft = job.drafts[-1] if job.drafts else None
            if (
                draft is None
                or draft.sealed
                or draft.first_row + draft.planned != start
                or draft.planned == self._cache.capacity.max_extent_rows
                or start in borders
            ):
                draft = self._new(job, start)
            count = min(rows, self._cache.capacity.max_extent_rows - draft.planned)
            border = next((row for row in borders if row > start), start + count)
            count = self._fit(draft, min(count, border - start), now)
            if count:
                saves.append(Save(draft.id, draft.slots, draft.planned, start, count))
                draft.planned += count
                draft.teed += count
                start += count
                rows -= count
            else:  # a gap: what follows could not be matched, so it is not saved
                job.saving = False
        return tuple(saves)

    def _borders(self, job: Job) -> list[int]:
        """List the rows at which extents of a job end, in ascending order: an extent has one salt, and breakpoints are ends."""
        prefix = self.prefix_of(job)
        ends = [prefix.rows] if prefix is not None else []
        return sorted({*ends, *(each.rows for each in job.spec.breakpoints)}) if job.spec.breakpoints else ends

    def prefix_of(self, job: Job) -> SharedPrefix | None:
        """Find the registered prefix of a job's tokens that lies under another salt, if there is one."""
        return self._cache.registered_prefix(job.spec.salt, job.tokens)

    def advance(self, job: Job, times: int, now: float) -> None:
        """Commit a row that was planned last and carried out `times` times, each time a row further."""
        draft = job.drafts[-1]
        draft.teed += times - 1
        draft.planned = draft.rows = draft.planned + times - 1
        if draft.rows == self._cache.capacity.max_extent_rows:
            self._seal(job, now, all_of_them=False)

    def tee_one(self, job: Job, row: int, soon: int, now: float) -> tuple[Save, ...]:
        """`tee` of one row: most of the time there is a draft, and room for it. It gets more if it has room for `soon`
        rows only."""
        if job.drafts:
            draft = job.drafts[-1]
            planned = draft.planned
            if 0 < draft.room - planned <= soon:
                self._widen(draft)
            if planned < draft.room and not draft.sealed and draft.first_row + planned == row:
                draft.planned = planned + 1
                draft.teed += 1
                return (Save(draft.id, draft.slots, planned, row, 1),)
        return self.tee(job, row, 1, now)

    def tee_more(self, job: Job, rows: int) -> int:
        """Plan to save up to `rows` rows behind the one that was planned last, if there is room. Returns how many."""
        draft = job.drafts[-1]
        count = max(0, min(rows, draft.room - draft.planned))
        draft.planned += count
        draft.teed += count
        return count

    def take_back(self, job: Job, rows: int) -> None:
        """Take note that the last `rows` rows planned were not those of the job's tokens, and were not saved."""
        draft = job.drafts[-1]
        draft.planned -= rows
        draft.teed -= rows

    def _new(self, job: Job, start: int) -> Draft:
        self._last_id += 1
        draft = self._open[self._last_id] = Draft(self._last_id, job, job.salt, start)
        job.drafts.append(draft)
        return draft

    def _fit(self, draft: Draft, rows: int, now: float) -> int:
        """Get slots for `rows` more rows of a draft; returns how many fit."""
        block = self._cache.capacity.block_rows
        need = self._cache.capacity.blocks(draft.planned + rows) - len(draft.slots)
        if need > 0:
            slots = None
            if (
                rows == 1 and self._cache.host.pool.free > self._cache.host.low + SLOTS_AHEAD
            ):  # more rows are going to come
                need = min(SLOTS_AHEAD, self._cache.capacity.max_extent_rows // block - len(draft.slots))
            while need > 0 and slots is None:
                slots = self._cache.host.urge_slots(need, now, draft.slots[-1] if draft.slots else None)
                need = need if slots is not None else min(need - 1, self._cache.host.pool.free)
            draft.slots += slots or ()
            draft.room = min(len(draft.slots) * block, self._cache.capacity.max_extent_rows)
        return min(rows, len(draft.slots) * block - draft.planned)

    def _widen(self, draft: Draft) -> None:
        """Give a decoding job a slot before it needs one, if that costs nothing."""
        if (
            draft.slots
            and draft.room < self._cache.capacity.max_extent_rows
            and self._cache.host.pool.free > SLOTS_AHEAD
        ):
            draft.slots += self._cache.host.pool.take(1, draft.slots[-1]) or ()
            draft.room = len(draft.slots) * self._cache.capacity.block_rows

    def commit(self, job: Job, now: float) -> None:
        """Take note that a step of the job was computed: seal drafts that are full, or that end with the prompt."""
        for draft in job.drafts:
            draft.rows = draft.planned
        all_of_them = not job.saving or job.rows == job.target
        if all_of_them or any(draft.rows == self._cache.capacity.max_extent_rows for draft in job.drafts):
            self._seal(job, now, all_of_them)

    def keep(self, job: Job, now: float) -> tuple[Save, ...]:
        """Plan to save all rows that a job has computed over a selection. It is about to leave the device."""
        job.saving = True
        saves = self.tee(job, job.covered, max(0, job.rows - job.covered), now)
        for draft in job.drafts:
            draft.rows = draft.planned
        return saves

    def leave(self, job: Job, now: float) -> None:
        """Seal the drafts of a job that leaves the device: rows planned but not committed are void, and there will be no more."""
        for draft in job.drafts:
            draft.planned = draft.rows
        self._seal(job, now, all_of_them=True)

    def _seal(self, job: Job, now: float, all_of_them: bool) -> None:
        for draft in job.drafts:
            if all_of_them or draft.rows == self._cache.capacity.max_extent_rows:
                draft.sealed = True
        self._resolve(job, now)

    def saved(self, done: SaveDone, now: float) -> Job | None:
        """Take note that rows of a draft are in their slots, or could not be. Returns the job, if the draft is still known."""
        draft = self._open.get(done.draft)
        if draft is None:
            return None
        draft.answered += done.rows
        if not done.ok:
            draft.bad_from = min(done.first_row, draft.bad_from if draft.bad_from is not None else done.first_row)
            if draft.bad or not draft.sealed:  # rows that never were committed do not matter
                draft.job.saving = False
                self._seal(draft.job, now, all_of_them=True)
        self._resolve(draft.job, now)
        return draft.job

    def _resolve(self, job: Job, now: float) -> None:
        """Turn the job's first drafts into extents, as far as they are sealed and answered."""
        while job.drafts and job.drafts[0].complete:
            draft = job.drafts.pop(0)
            del self._open[draft.id]
            used = 0
            if draft.rows and not (draft.dead or draft.bad):
                blocks = self._cache.capacity.blocks(draft.rows)
                used = blocks if self._insert(draft, draft.slots[:blocks], now) else 0
            self._cache.host.pool.give(draft.slots[used:])

    def _insert(self, draft: Draft, slots: tuple[int, ...], now: float) -> bool:
        """Make a saved draft an extent. True if its slots are now the extent's."""
        job = draft.job
        prefix, own = (
            bytes(job.tokens[: 4 * draft.first_row]),
            bytes(job.tokens[4 * draft.first_row : 4 * draft.stop]),
        )
        registered = self.prefix_of(job)
        of_prefix = registered is not None and draft.stop <= registered.rows and draft.salt == job.spec.salt
        salt = registered.salt if registered is not None and of_prefix else draft.salt
        extent = self._cache.new_extent(salt, prefix, own, job.spec.volatile, now)
        if not self._cache.within_quota(salt, extent.file_bytes):
            self._cache.counters.rows_unsaved += draft.rows
            job.saving = False
            return False
        outcome, holders = self._cache.insert(extent, prefix)
        if outcome == "orphan":
            self._cache.counters.orphans += 1
            job.saving = False
            return False
        # A job that was sent back computes these rows once more, for a draft that begins before this one's end.
        again = any(later.first_row < draft.stop for later in job.drafts[:1])
        if job.covered == draft.first_row and not again:
            job.covered = draft.stop
        for holder in holders:
            if holder not in job.uses:
                job.uses[holder] = None
                holder.ref_count += 1
        context = self._cache.device.contexts.get(job.context) if job.context is not None else None
        if context is not None and not context.doomed:
            self._cache.device.contain(context, holders)
        for holder in holders:
            self._cache.need(holder, now, job.spec.ttl, job.spec.volatile)
        if outcome == "duplicate":
            self._cache.counters.duplicates += 1
        else:
            self._cache.add(extent, slots, now)
        if any(each.rows > draft.first_row for each in job.spec.breakpoints):
            job.grown = draft.stop if draft.stop == job.spec.breakpoints[-1].rows else 0
            self._cache.mark(self._cache.match(draft.salt, prefix + own).views, job.spec.breakpoints, now)
        return outcome != "duplicate"

    def kill(self, job: Job) -> None:
        """Forget what the job has sealed: its rows are not to become extents."""
        for draft in job.drafts:
            draft.dead = draft.dead or draft.sealed

    def slots(self) -> list[int]:
        """List all slots that drafts hold."""
        return [slot for draft in self._open.values() for slot in draft.slots]

    def check(self) -> None:
        """Counts fit each other."""
        for draft in self._open.values():
            assert draft in draft.job.drafts
            assert 0 <= draft.rows <= draft.planned <= len(draft.slots) * self._cache.capacity.block_rows
            assert draft.answered <= draft.teed
            assert not (draft.complete and draft.job.drafts[0] is draft)
