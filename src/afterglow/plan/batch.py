"""The jobs on the device: their room there, and what remains of them when they leave.

It knows segments, retained contexts and drafts; not the queue, and not what a step computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from afterglow.plan.admission import Admission
from afterglow.plan.device import GROWTH, Device
from afterglow.plan.drafts import Drafts
from afterglow.plan.extent import Capacity, Extent
from afterglow.plan.index import Index
from afterglow.plan.jobs import Job
from afterglow.plan.merging import Merging
from afterglow.plan.prefixes import Prefix
from afterglow.plan.salts import client_salt, covers
from afterglow.plan.sessions import Sessions
from afterglow.plan.step import Release


class Batch:
    """Jobs that run, and jobs that have run and are still being saved."""

    def __init__(
        self, capacity: Capacity, index: Index, device: Device, drafts: Drafts, sessions: Sessions, merging: Merging
    ) -> None:
        self.running: list[Job] = []  # in order of admission
        self.releases: list[Release] = []
        self._tails: dict[int, Job] = {}  # off the device, perhaps finished, with drafts still being saved; by seq
        self._capacity = capacity
        self._index = index
        self._device = device
        self._drafts = drafts
        self._sessions = sessions
        self._merging = merging

    def extend(self, job: Job) -> bool:
        """More room for a decoding job, at the cost of retained contexts."""
        least = self._capacity.round_up(job.rows + 1)
        most = self._capacity.round_up(len(job.spec.prompt) // 4 + job.spec.max_tokens)
        for rows in (min(job.capacity + GROWTH * self._capacity.block_rows, most), least):
            if least <= rows <= self._device.budget and self._device.reserve(rows - job.capacity):
                job.capacity = rows
                return True
        return False

    def extend_early(self, job: Job) -> None:
        """The same before it has to be, if that costs nothing."""
        most = self._capacity.round_up(len(job.spec.prompt) // 4 + job.spec.max_tokens)
        rows = min(job.capacity + GROWTH * self._capacity.block_rows, most, self._device.budget)
        if rows > job.capacity and self._device.used + rows - job.capacity <= self._device.budget:
            self._device.reserve(rows - job.capacity)
            job.capacity = rows

    def depart(self, job: Job, admission: Admission, now: float, retain: bool) -> None:
        """Off the device. What was committed may stay there as a context, as far as the index knows it or will."""
        self.running.remove(job)
        admission.unpin(job)
        self._drafts.leave(job, now)
        if job.drafts:
            self._tails[job.seq] = job
        rows = min(job.rows, job.reach)
        job.context = None
        if retain and job.spec.write and rows and not job.approximate:
            tokens = bytes(job.tokens[: 4 * rows])
            context = self._device.retain(job.spec.salt, tokens, rows, job.capacity)
            views = self._index.match(job.spec.salt, tokens).views
            self._device.contain(context, tuple(view.extent for view in views))
            if self._index.prefixes and Prefix(job.spec.salt, tokens) in self._index.prefixes:
                self._device.hold(context)
            job.context = context.id
        else:
            self._device.release(job.capacity)
        self.releases.append(Release(job.spec.job, job.context, rows if job.context is not None else 0))
        job.rows = job.capacity = 0
        job.stages, job.stop = [], None

    def settle(self, job: Job, now: float) -> None:
        """If nothing of a job is on the device or being saved any more, let go of the extents it went through."""
        if job.drafts:
            return
        self._tails.pop(job.seq, None)
        if job.running:
            return
        held = list(job.held)
        if held and job.spec.session is not None and job.spec.write and not job.disowned:
            extents = [view.extent for view in self._index.match(job.spec.salt, bytes(job.tokens)).views]
            self._sessions.used(client_salt(job.spec.salt), job.spec.session, extents, now)
        self._let_go(job)
        if job.disowned:
            self._merging.cancel()
            self._sessions.discard(held)
        context = self._device.contexts.get(job.context) if job.context is not None else None
        if context is not None:  # of what was not saved after all, nothing will ever be matched
            context.rows = self._index.match(context.salt, context.tokens[: 4 * context.rows]).rows
            if not context.rows:
                self._device.free(context)
        job.context = None
        if held and job.state == "gone" and not job.disowned:
            self._merging.ended(job, self._drafts.next_serial(), now)

    def promising(self) -> Iterator[Job]:
        """Jobs whose tokens are on their way into the index."""
        yield from self.running
        yield from self._tails.values()

    def forget_tails(self, whose: str | None) -> None:
        """What jobs (see `covers`) have left to be saved is not to become extents, and keeps none any more."""
        for job in self._tails.values():
            if not covers(whose, job.spec.salt):
                continue
            self._drafts.kill(job)
            if not job.running:
                self._let_go(job)

    def disown(self, tenant: str, name: str, jobs: Iterable[Job]) -> None:
        """A conversation has been deleted: what its turns (among `jobs`, or still being saved) use and leave goes when
        they end."""
        for job in (*jobs, *self._tails.values()):
            if job.owner == (tenant, name):
                job.disowned = True

    def _let_go(self, job: Job) -> None:
        for extent in job.held:
            extent.users -= 1
        job.held = {}

    def path_rows(self, job: Job) -> int:
        """Rows of all extents that a job goes through or leaves, in whole blocks."""
        rows = [*(extent.rows for extent in job.held), *(draft.rows for draft in job.drafts)]
        return sum(self._capacity.round_up(count) for count in rows)

    def expected_slots(self) -> int:
        """Host slots that running prefills are going to need."""
        return sum(
            self._capacity.blocks(job.target - max(job.rows, job.covered))
            for job in self.running
            if job.state == "prefilling" and job.saving
        )

    def check(self, queued: list[Job], copied: list[Extent]) -> None:
        """Budgets and reference counts against the jobs (and copies, which read `copied`) that cause them."""
        self._device.check(sum(job.capacity for job in self.running))
        pins: dict[Extent, int] = {}
        users: dict[Extent, int] = {}
        for extent in copied:
            pins[extent] = pins.get(extent, 0) + 1
        for job in dict.fromkeys([*queued, *self.running, *self._tails.values()]):
            for extent in job.pins:
                pins[extent] = pins.get(extent, 0) + 1
            for extent in job.held:
                users[extent] = users.get(extent, 0) + 1
            assert bool(job.drafts) or job.seq not in self._tails
            assert job.running or not (job.capacity or job.rows)
        for extent in self._index.extents.values():
            assert extent.pins == pins.get(extent, 0)
            assert extent.users == users.get(extent, 0)
