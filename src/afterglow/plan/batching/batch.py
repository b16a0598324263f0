"""The jobs on the device: their room there, and the contexts that remain when they leave. It knows not what a step consists of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from afterglow.plan.batching.drafts import Drafts
from afterglow.plan.batching.job import Job
from afterglow.plan.batching.merging import Merging
from afterglow.plan.cache import Cache
from afterglow.plan.prefix.extent import Extent, View
from afterglow.plan.prefix.salts import client_salt, covers
from afterglow.plan.prefix.tree import common_rows
from afterglow.plan.step import Release
from afterglow.plan.tiers.device import GROWTH_BLOCKS, DeviceSegment


class Batch:
    """Jobs that run, and jobs that have run and are still being saved."""

    def __init__(self, cache: Cache, drafts: Drafts, merging: Merging) -> None:
        self.running: list[Job] = []  # in order of admission
        self.releases: list[Release] = []
        self._tails: dict[int, Job] = {}  # off the device, perhaps finished, with drafts still being saved; by seq
        self._cache = cache
        self.drafts = drafts
        self.merging = merging

    def fellow(self, job: Job, tokens: bytes, most: int) -> tuple[Job | None, int]:
        """Find the running job that has most of a job's first rows on the device, and how many whole pages of them; at most `most`
        rows, and of equals the first job."""
        device = self._cache.device
        found, found_rows = None, 0
        for other in self.running if device.shares else ():
            if (limit := min(other.rows, most, job.most_of(other))) > found_rows:
                rows = common_rows(other.tokens, 0, tokens, 0, limit) // device.block * device.block
                if rows > found_rows and other.lacks.usable(rows, device.window) == rows:
                    found, found_rows = other, rows
        return found, found_rows

    def extend(self, job: Job) -> bool:
        """Give a decoding job more room, at the cost of retained contexts."""
        least = self._cache.capacity.round_up(job.rows + 1)
        most = self._cache.capacity.round_up(len(job.spec.prompt) // 4 + job.spec.max_tokens)
        for rows in (min(job.capacity + GROWTH_BLOCKS * self._cache.capacity.block_rows, most), least):
            if least <= rows <= self._cache.device.most and self._cache.device.reserve(job.segment, rows):
                return True
        return False

    def extend_early(self, job: Job) -> None:
        """Give a decoding job more room before it needs it, if that costs nothing."""
        most = self._cache.capacity.round_up(len(job.spec.prompt) // 4 + job.spec.max_tokens)
        device = self._cache.device
        rows = min(job.capacity + GROWTH_BLOCKS * self._cache.capacity.block_rows, most, device.most)
        if rows > job.capacity and device.has_room(job.segment, rows):
            device.reserve(job.segment, rows)

    def pin(self, job: Job, views: Sequence[View]) -> None:
        """Pin the extents that the job is about to gather from; unpin those of before."""
        before, job.pins = job.pins, [view.extent for view in views]
        for extent in job.pins:
            self._cache.pin(extent)
        for extent in before:
            self._cache.unpin(extent)

    def unpin(self, job: Job) -> None:
        """Unpin the job's extents: it has gathered its rows, or never will."""
        self.pin(job, ())

    def depart(self, job: Job, now: float, retain: bool) -> None:
        """Take a job off the device. Its committed rows may stay as a context, as far as the index knows them or will."""
        self.running.remove(job)
        self.unpin(job)
        keeps = retain and job.spec.write and job.approximate and job.salt == self._cache.selecting_salt(job.spec)
        saves = self.drafts.keep(job, now) if keeps else ()
        self.drafts.leave(job, now)
        if job.drafts:
            self._tails[job.seq] = job
        rows = min(job.rows, job.reach)
        job.context = None
        if retain and job.spec.write and rows and not job.approximate:
            tokens = bytes(job.tokens[: 4 * rows])
            lacks = self._cache.device.letting_go(job.lacks, job.rows)
            job.context = self._cache.retain(job.spec.salt, tokens, rows, job.segment, lacks).id
        else:
            self._cache.device.release(job.segment)
        self.releases.append(Release(job.spec.job, job.context, rows if job.context is not None else 0, saves))
        job.rows, job.segment = 0, DeviceSegment()
        job.stages, job.stop = [], None

    def settle(self, job: Job, now: float) -> None:
        """Let go of a job's extents, if none of its rows is on the device or being saved any more."""
        if job.grown:
            self.merging.grown(job, now)
        if job.drafts:
            return
        self._tails.pop(job.seq, None)
        if job.running:
            return
        used = list(job.uses)
        if used and job.spec.session is not None and job.spec.write and not job.disowned:
            path = self._cache.match(job.salt, bytes(job.tokens)).views
            self._cache.sessions.used(client_salt(job.spec.salt), job.spec.session, path, now)
        self._let_go(job)
        if job.disowned:
            self.merging.cancel()
            self._cache.sessions.discard(used)
        if job.context is not None:
            self._cache.trim(job.context)
        job.context = None
        if used and job.state == "gone" and not job.disowned:
            self.merging.ended(job, now)

    def promising(self) -> Iterator[Job]:
        """Yield the jobs whose tokens are on their way into the index."""
        yield from self.running
        yield from self._tails.values()

    def forget_tails(self, whose: str | None) -> None:
        """Give up the drafts that departed jobs (see `covers`) still save: they become no extents, and keep none."""
        for job in self._tails.values():
            if not covers(whose, job.spec.salt):
                continue
            self.drafts.kill(job)
            if not job.running:
                self._let_go(job)

    def disown(self, tenant: str, name: str, jobs: Iterable[Job]) -> bool:
        """Take note that a conversation was deleted: the rows of its turns (among `jobs`, or still being saved) go when they
        end. False: it has none."""
        own = [job for job in (*jobs, *self._tails.values()) if job.owner == (tenant, name)]
        for job in own:
            job.disowned = True
        return bool(own)

    def _let_go(self, job: Job) -> None:
        for extent in job.uses:
            extent.ref_count -= 1
        job.uses = {}

    def path_rows(self, job: Job) -> int:
        """Count the rows of all extents that a job goes through or leaves, in whole blocks."""
        rows = [*(extent.rows for extent in job.uses), *(draft.rows for draft in job.drafts)]
        return sum(self._cache.capacity.round_up(count) for count in rows)

    def expected_slots(self) -> int:
        """Host slots that running prefills are going to need."""
        return sum(
            self._cache.capacity.blocks(job.target - max(job.rows, job.covered))
            for job in self.running
            if job.state == "prefilling" and job.saving
        )

    def check(self, queued: list[Job], copied: list[Extent]) -> None:
        """Budgets and reference counts against the jobs (and copies, which read `copied`) that cause them."""
        self._cache.device.check([job.segment for job in self.running])
        pins: dict[Extent, int] = {}
        users: dict[Extent, int] = {}
        for extent in copied:
            pins[extent] = pins.get(extent, 0) + 1
        for job in dict.fromkeys([*queued, *self.running, *self._tails.values()]):
            for extent in job.pins:
                pins[extent] = pins.get(extent, 0) + 1
            for extent in job.uses:
                users[extent] = users.get(extent, 0) + 1
            assert bool(job.drafts) or job.seq not in self._tails
            assert job.running or not (job.capacity or job.rows)
        for extent in self._cache.index.extents.values():
            assert extent.pins == pins.get(extent, 0)
            assert extent.ref_count == users.get(extent, 0)
