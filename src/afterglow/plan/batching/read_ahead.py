"""What the next job is going to gather, so that it comes to the device before its turn (CachedAttention §3.2.1, figure 6c).

    others compute        the job that is next waits for a seat, for room, or for its turn
    `Step.ahead`          says which rows it would gather: all lie in host, in slots that stay for as long as steps say so
    the job joins         its first layers are in a buffer on the device, and the others follow while these are computed

It is a forecast. What a job gathers is decided when it joins (`admission`); where that is something else, the buffer is of no use.
"""

from __future__ import annotations

from afterglow.plan.batching.admission import Admission, beyond
from afterglow.plan.batching.job import Job
from afterglow.plan.batching.load_or_recompute import stages_of
from afterglow.plan.batching.queue import RequestQueue
from afterglow.plan.cache import Cache
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.step import RowsAhead
from afterglow.plan.tiers.buffers import read_buffer_layers

PINNED_PART = 4  # of host: a quarter of its slots may be kept for a job that does not run


class ReadAhead:
    """The job whose rows are read ahead, one at a time, and the pins of its extents."""

    def __init__(self, cache: Cache, queue: RequestQueue, admission: Admission) -> None:
        self.pins: list[Extent] = []
        self._cache = cache
        self._queue = queue
        self._admission = admission
        self._job: Job | None = None
        self._ahead: RowsAhead | None = None
        self._known = (-1, -1)  # the index's version, and the contexts freed so far, when that was found
        self._tried = -1  # the queue's version then

    @property
    def enabled(self) -> bool:
        """Is there a buffer, and do jobs take layer after layer? Where layers have a window, it would be of other rows in each."""
        device, loading = self._cache.device, self._cache.loading
        there = self._cache.capacity.read_buffer_rows > 0 and not device.window
        return there and loading.read_buffer != 0 and not self._admission.decision.whole

    def choose(self, job: Job | None, now: float) -> RowsAhead | None:
        """Say what is to be read ahead for a job (None: for none), and keep its slots from being used for anything else."""
        known = self._cache.index.version, self._cache.counters.evicted_device
        stands = job is self._job and known == self._known
        if stands and (self._ahead is not None or self._tried == self._queue.version):
            return self._ahead
        self._job, self._known, self._tried = job, known, self._queue.version
        self._ahead, extents = (None, []) if job is None else self._foreseen(job, now)
        before, self.pins = self.pins, extents
        for extent in extents:
            self._cache.pin(extent)
        for extent in before:
            extent.read_ahead = False
            self._cache.unpin(extent)
        for extent in extents:
            extent.read_ahead = True
        return self._ahead

    def _foreseen(self, job: Job, now: float) -> tuple[RowsAhead | None, list[Extent]]:
        """Find what a job would gather if it joined now, where all of it is in host; and the extents that it is in."""
        tokens = bytes(job.tokens)
        if not job.spec.read or job.spec.selects or job.origin is not None or job.cut is not None:
            return None, []
        match = self._admission.match(job, tokens, job.spec.salt)
        if not match.rows or self._admission.is_promised(job, tokens, match.rows):
            return None, []
        row = self._admission.on_device(job, tokens, match)[2]
        views = beyond(match, row)
        extents = list(dict.fromkeys(view.extent for view in views))
        if not views or any(extent.host != "ready" for extent in extents):
            return None, []
        if sum(len(extent.slots) for extent in extents) > self._cache.host.pool.total // PINNED_PART:
            return None, []
        if self._admission.decision.choose(job, views, row, now) != views:
            return None, []
        (stage,) = stages_of(views, views, row)
        ahead = RowsAhead(job.spec.job, row, stage.gathers, self._layers(job, stage.start - row, stage.start))
        return (ahead, extents) if ahead.layers else (None, [])

    def _layers(self, job: Job, rows: int, start: int) -> int:
        """Return how many layers of the `rows` rows before row `start` are read ahead: by the formula, as many as an operator has said,
        or all; no more than the buffer holds."""
        capacity, wanted, layers = self._cache.capacity, self._cache.loading.read_buffer, self._cache.capacity.layers
        load = rows * capacity.read_row_seconds
        if isinstance(wanted, int):
            layers = min(layers, wanted)
        elif wanted is not None and load:
            compute = self._cache.cost.compute(job.length - start, start) / layers
            layers = read_buffer_layers(layers, load, compute, exact=wanted == "auto")
        return min(layers, capacity.read_buffer_rows // capacity.round_up(rows))
