"""Load or recompute: which cached rows a job takes from disk, which it computes again, and when it may begin.

It knows costs, loads and the job's views; not the queue, not the device.

What the queries of a prefill see of cached rows in layers with a sliding window: the rest of an extent need not be loaded.

    window 3, queries from row 8 on       rows 0 1 2 3 4 5 . . | 8   seen: from row 6 on
                                          extents [0-3] [4-7]        of the first none, of the second its rows 2 and 3

A copy in host that lacks rows may be used by prefills that do not see them, and by nothing else (`Extent.in_host`).
`SeenRows` knows views and windows; not how extents come to host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from afterglow.plan.batching.job import Job, Stage
from afterglow.plan.cache import Cache
from afterglow.plan.options import SchedulerOptions
from afterglow.plan.prefix.extent import Extent, View
from afterglow.plan.step import Gather
from afterglow.plan.tiers.cost import MIN_GATHERED


class SeenRows:
    """One model's windows. Where loads bring all rows, all is seen."""

    def __init__(self, cache: Cache) -> None:
        self._capacity = cache.capacity
        self._registered = cache.registered
        self._window = cache.device.window if cache.capacity.window_block_bytes else 0

    def firsts(self, views: Sequence[View], kept: Sequence[View], row: int, *, forks: bool = False) -> list[int]:
        """Return of each kept view the first row of its extent that windows show, if the other views are recomputed.

        The views begin at `row` of a job. Kept ones one after another are gathered for queries from their common end on. `forks`:
        what windows show other prompts counts as well, those that leave this one's path where it is known to fork.
        """
        if not self._window:
            return [0] * len(kept)
        found: list[int] = []
        at = query = row + sum(view.stop - view.start for view in views)
        for view in reversed(views):
            if forks and view.forks():
                query = at
            at -= view.stop - view.start
            if len(found) < len(kept) and view is kept[-1 - len(found)]:
                found.append(max(0, query + 1 - self._window - at + view.start))
            else:
                query = at
        return found[::-1]

    def obtainable(self, view: View, first: int, mine: Sequence[Extent]) -> bool:
        """Are the rows that a view shows from `first` on in host, do they come there, or can they be loaded? An extent that others
        (`mine`: the pins of the job itself) gather from, or wait for, cannot be loaded again now. A registered prefix pins them
        too, but reads none."""
        extent = view.extent
        if extent.host == "absent" or view.shows(first):
            return True
        return extent.host == "partial" and extent.pins == mine.count(extent) + self._registered.holds(extent)

    def choose(
        self, views: Sequence[View], kept: list[View], row: int, shows: Callable[[View, int], bool]
    ) -> list[View]:
        """Choose the kept views that show what is seen of them: without one of them, earlier queries see the others."""
        while self._window:
            left = [view for view, first in zip(kept, self.firsts(views, kept, row), strict=True) if shows(view, first)]
            if len(left) == len(kept):
                break
            kept = left
        return kept

    def skip(self, extent: Extent, first: int) -> int:
        """Count the blocks at the beginning of an extent that windows do not show, if they show its rows from `first` on. Registered
        rows stay in host for later prompts: their loads bring all."""
        if not first or self._registered.holds(extent):
            return 0
        return self._capacity.blocks(extent.rows) if first >= extent.rows else first // self._capacity.block_rows

    def load_bytes(self, extent: Extent, first: int) -> int:
        """Compute the bytes of a load that brings what windows show."""
        return extent.file_bytes - self.skip(extent, first) * self._capacity.window_block_bytes


class LoadOrRecompute:
    """Decides by predicted times, or as `source` says. `whole`: a job begins when all its rows are there (a baseline)."""

    def __init__(self, cache: Cache, seen: SeenRows, options: SchedulerOptions) -> None:
        self.source = options.source
        self.whole = options.preload == "whole"
        self._cache = cache
        self._seen = seen

    def choose(self, job: Job, views: list[View], row: int, now: float) -> list[View]:
        """Choose the views to be used, so that the prefill is predicted to end first; the others are recomputed.

        The tail of the rows on disk is loaded while the head is recomputed: loaded rows need no recomputed ones. Loading
        all, recomputing all, and recomputing rows in host are cases of this.
        """
        cold = self._cold(views, row)
        if self.source == "load" or not views or (self.source == "auto" and not self._known([views[i] for i in cold])):
            return views
        if self.source == "recompute":
            return []
        return self._fastest(job, views, cold, row, now)[0] or self._tried(views, cold, row)

    def selecting_pays(self, job: Job, views: list[View], selected: list[View], row: int, now: float) -> bool:
        """Is a job's prefill predicted to end sooner where it reads the important rows of `selected` (SPEC) than where it is exact, with
        those of `views`? Both come behind its first `row` rows.

        Rows in device and host memory are used as they are. Where reading cannot be compared with computing yet, all rows are read,
        which is exact, and from which that is learned. Where it is predicted to end later, that is tried now and then.
        """
        if self.source != "auto" or not job.spec.retention:
            return True
        cold = self._cold(views, row)
        if not cold or not self._known([views[i] for i in cold]):
            return False
        cost = self._cache.cost
        prefix = row + sum(view.stop - view.start for view in selected)
        sizes = [selected[i].extent.file_bytes for i in self._cold(selected, row)]
        selecting = cost.select_from(job.length - prefix, prefix, job.spec.retention, sizes, now)
        longer = selecting - self._fastest(job, views, cold, row, now)[1]
        return longer < 0 or cost.may_select(longer)

    def _cold(self, views: list[View], row: int) -> list[int]:
        """Return the numbers of the views whose rows have to be read."""
        firsts = self._seen.firsts(views, views, row, forks=False)
        return [i for i, view in enumerate(views) if not (view.extent.in_host and view.shows(firsts[i]))]

    def _fastest(self, job: Job, views: list[View], cold: list[int], row: int, now: float) -> tuple[list[View], float]:
        """Choose the views to be used, and predict the seconds until the prefill ends."""
        cost = self._cache.cost
        brought = self._seen.firsts(views, views, row, forks=True)
        starts, end = [], row
        for view in views:
            starts.append(end)
            end += view.stop - view.start
        final = cost.compute(job.length - end, end)
        gathering = cost.gather(end - row)
        flying = [views[i].extent.load for i in cold]
        far = [self._cache.loading.is_far(views[i].extent) for i in cold]
        reads = [self._read(views[i].extent, brought[i]) for i in cold]
        best, recomputed, head = float("inf"), 0, 0.0
        for split in range(len(cold) + 1):
            if split:  # the view before the split is recomputed too
                i = cold[split - 1]
                rows = views[i].stop - views[i].start
                follows = split > 1 and cold[split - 2] == i - 1
                head += cost.compute(rows, starts[i]) - (cost.compute(0, 0) if follows else 0.0) - cost.gather(rows)
            under_way = [move for move in flying[split:] if move is not None]
            rest = list(zip(reads[split:], flying[split:], far[split:], strict=True))
            near = [seconds for seconds, move, away in rest if move is None and not away]
            fetches = [seconds for seconds, move, away in rest if move is None and away]
            first, last = cost.coming(under_way, near, now, fetches)
            total = max(max(head + gathering, first) + final, last + final / cost.layers)
            if total < best:
                best, recomputed = total, split
        if (all_new := cost.compute(job.length - row, row)) < best:
            return [], all_new
        gone = set(cold[:recomputed])
        return [view for i, view in enumerate(views) if i not in gone], best

    def _tried(self, views: list[View], cold: Sequence[int], row: int) -> list[View]:
        """Choose, now and then, a few rows in host although computing them is faster: else a host that was slow once would be slow
        for ever."""
        away = set(cold)
        tried: list[View] = []
        fewest = float("inf")
        run: list[View] = []  # in host, one behind another
        rows = 0  # of the run
        for i, view in enumerate(views):
            row += view.stop - view.start
            run = [] if i in away else [*run, view]
            rows = rows + view.stop - view.start if run else 0
            if rows < MIN_GATHERED:
                continue  # of so few nothing would be learned
            if rows < fewest and self._cache.cost.may_gather(rows, row - rows):
                tried, fewest = run, rows
            run, rows = [], 0
        return tried

    def pays(self, views: list[View], rows: int, now: float) -> bool:
        """Is loading and copying them faster than computing what remains of the prompt from its first token?"""
        if self.source != "auto" or not self._known(views):
            return self.source != "recompute"
        extents = dict.fromkeys(view.extent for view in views)  # of a scattered list, many views are of one extent
        absent = [extent for extent in extents if extent.host in ("absent", "partial")]
        near = [extent.file_bytes for extent in absent if not self._cache.loading.is_far(extent)]
        far = [extent.file_bytes for extent in absent if self._cache.loading.is_far(extent)]
        return self._cache.cost.loads(near, now, far) <= self._cache.cost.compute(rows, 0)

    def _read(self, extent: Extent, first: int) -> float:
        """Predict the seconds of a load that brings what windows show, or, from the shared tier, the whole extent."""
        if self._cache.loading.is_far(extent):
            return self._cache.cost.read(extent.file_bytes, far=True)
        return self._cache.cost.read(self._seen.load_bytes(extent, first))

    def _known(self, views: list[View]) -> bool:
        """Can loading these views be compared with computing them?"""
        far = [self._cache.loading.is_far(view.extent) for view in views]
        if not any(far):
            return self._cache.cost.known
        near = any(view.extent.host != "ready" and not away for view, away in zip(views, far, strict=True))
        return self._cache.cost.far_known and (self._cache.cost.known or not near)

    def may_begin(self, job: Job, stage: Stage, now: float) -> bool:
        """Beside running decodes: are the rows of a stage there, or so soon that no job has to wait for them?"""
        if isinstance(self._cache.loading.read_buffer, int):
            return True  # the loads go on only when the job has joined
        under_way = [move for move in stage.loads if self._cache.moves.is_under_way(move)]
        if not under_way:
            return True
        if self.whole:
            return False
        stop = stage.stop if stage.stop is not None else job.length
        computing = self._cache.cost.compute(stop - stage.start, stage.start)
        cost = self._cache.cost
        flowing = [move for move in under_way if not cost.is_held(move)]  # the others have the size of a formula
        return cost.known and cost.held_at(under_way) <= now and cost.fits(*cost.coming(flowing, (), now), computing)

    def begins_at(self, job: Job, stage: Stage, now: float) -> float:
        """Return when a stage may begin that may not now, as far as that depends on time alone."""
        under_way = [move for move in stage.loads if self._cache.moves.is_under_way(move)]
        stop = stage.stop if stage.stop is not None else job.length
        cost = self._cache.cost
        flowing = [move for move in under_way if not cost.is_held(move)]
        fits = cost.fits_at(flowing, cost.compute(stop - stage.start, stage.start), now)
        return max(fits, cost.held_at(under_way))

    def probe(self, views: list[View], now: float) -> None:
        """Read, now and then, the shortest extent on disk that is recomputed, beside the computation and for a part of its
        time: else a tier that was slow once would be slow for ever."""
        cold = [view.extent for view in views if view.extent.host == "absent" and view.extent.disk == "ready"]
        near = [extent for extent in cold if not self._cache.loading.is_far(extent)]
        if self.source != "auto" or not cold:
            return
        if near and self._cache.cost.known:
            extent = min(near, key=lambda each: (each.file_bytes, -each.first_row))
        elif len(near) < len(cold) and self._cache.cost.far_known:
            extent = next(each for each in cold if self._cache.loading.is_far(each))  # those behind it may be let go
        else:
            return
        most = self._cache.cost.probe(extent.rows, extent.first_row, now)
        if most is not None:
            self._cache.loading.probe(extent, most, now)


def stages_of(views: list[View], kept: list[View], row: int) -> list[Stage]:
    """Make the stages of a prefill from the views of a match; views that are not `kept` are recomputed."""
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
