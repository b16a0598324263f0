"""Parts of a step's attention as a kernel for CUDA reads them: tables of whole numbers, made once for all layers.

A *part* is a run of rows that some queries read, in pages of 64 rows, each at an address of its own. Parts are split: a *task* is
up to CHUNK rows and up to QUERIES queries. Splits begin at multiples of CHUNK, so that a query's result does not depend on what
else is in the batch. A task yields out and log-sum-exp of each of its queries, which are then merged for each query, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from afterglow.kernels.context_pages import PAGE_ROWS, Pages
from afterglow.kernels.sending import on_device

CHUNK = 256  # rows of a task, where few queries read them
CHUNK_PAGES = CHUNK // PAGE_ROWS
WIDE_CHUNK = 512  # where many do: what tasks write stays small beside what they read
DECODED = 16  # rows of a reply in a decode step, with those of guesses, at most
NARROW, WIDE = 32, 64  # rows of scores of a task: queries, with all heads of a group
FIELDS = 12  # of a task: see `PartTables`
UNSEEN = 2**40  # rows, more than there are


class PagedPart(NamedTuple):
    """Rows [start, stop) of pages of 64, and the rows of the batch that read them. `pages`: where the keys of the first head in layer
    0 are, in elements from the beginning of `data`, multiples of 8. `strides`: elements from a layer to the next, from keys to
    values, from a head to the next; a head's rows lie side by side. `causal` and `window` as in `kernels.decode.Read`."""

    data: Tensor
    pages: Sequence[int]
    start: int
    stop: int
    queries: Sequence[int]
    strides: tuple[int, int, int]
    causal: bool = False
    window: int = 0


def part_of(
    pages: Pages, start: int, stop: int, queries: Sequence[int], causal: bool = False, window: int = 0
) -> PagedPart:
    """Make a part of rows [start, stop) of a context."""
    layer, which, head = pages.data.stride()[:3]
    base = max(pages.first, start // WIDE_CHUNK * WIDE_CHUNK)
    found = pages.offsets(base, stop, pages.data)
    return PagedPart(pages.data, found, start - base, stop - base, queries, (layer, which, head), causal, window)


def tiles(dtype: torch.dtype, head_dim: int) -> tuple[int, ...]:
    """Return how many rows of scores a task may have, ascending: as many as a program's registers hold. Without tensor cores, in
    float32, these are few."""
    return (16,) if dtype == torch.float32 else (16, NARROW) if head_dim > 128 else (16, NARROW, WIDE)


def suited(dtype: torch.dtype, head_dim: int, group: int) -> bool:
    """Return whether the kernel takes such heads: a multiple of 8 dimensions, at most 256 (float32: 128), with few enough heads in a
    group."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    most = 128 if dtype == torch.float32 else 256
    return head_dim % 8 == 0 and head_dim <= most and group <= tiles(dtype, head_dim)[-1]


class TableSizes(NamedTuple):
    """How many numbers the tables of some parts hold (see `PartTables`), how many `results` their tasks yield, and how many rows of
    scores a task has."""

    tasks: int
    pages: int
    queries: int
    targets: int
    order: int
    results: int
    tile: int

    @property
    def total(self) -> int:
        """Count the numbers of all tables."""
        return sum(self[:5])

    def rounded(self, rows: int) -> TableSizes:
        """Return the sizes of tables that have room for these, and for many others: a power of two of tasks, as many pages as these mostly
        read, a query and a target for each of `rows` rows of the batch, a result for each task, or powers of two times as many."""
        tasks = _power(max(self.tasks // FIELDS, -(-self.pages // CHUNK_PAGES)))
        queries, results = rows * _power(-(-self.queries // rows)), tasks * _power(-(-self.results // tasks))
        return TableSizes(FIELDS * tasks, CHUNK_PAGES * tasks, queries, 3 * rows, results, results, self.tile)


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


class PartLists:
    """The tables of a step's parts as lists on the host: see `PartTables`."""

    def __init__(self, parts: Sequence[PagedPart], group: int, base: Tensor) -> None:
        """Take at least one part, none empty. `group`: query heads that share a KV head. Pages are counted from the beginning of `base`,
        of the pages' dtype and number of dimensions."""
        most = max(len(part.queries) for part in parts) * group
        sizes = tiles(base.dtype, base.shape[4])
        self._base, self._tile = base, next((size for size in sizes if most <= size), sizes[-1])
        self._tasks: list[int] = []
        self._pages: list[int] = []
        self._queries: list[int] = []
        self._count = 0
        results: dict[int, list[int]] = {}
        for part in parts:
            self._add(part, group, results)
        self._order = [result for found in results.values() for result in found]
        self._targets: list[int] = []
        at = 0
        for row, found in results.items():
            self._targets += (row, at, at + len(found))
            at += len(found)

    @property
    def sizes(self) -> TableSizes:
        """Return how many numbers the tables hold."""
        return TableSizes(
            *(len(self._tasks), len(self._pages), len(self._queries), len(self._targets), len(self._order)),
            *(self._count, self._tile),
        )

    def numbers(self, sizes: TableSizes | None = None) -> list[int]:
        """Return all tables, one after another; with `sizes`, filled up to these with tasks that read nothing and rows of the batch that
        merge nothing: those behind the first ones."""
        lists = (self._tasks, self._pages, self._queries, self._targets, self._order)
        if sizes is None:
            return [number for each in lists for number in each]
        rows = range(len(self._targets) // 3, sizes.targets // 3)
        filled = ((), (), (), [number for row in rows for number in (row, 0, 0)], ())
        found: list[int] = []
        for each, more, size in zip(lists, filled, sizes, strict=False):
            found += each
            found += more
            found += [0] * (size - len(each) - len(more))
        return found

    def _add(self, part: PagedPart, group: int, results: dict[int, list[int]]) -> None:
        n = len(part.queries)
        wide = n > DECODED if part.causal else n * group > NARROW
        chunk = WIDE_CHUNK if wide else CHUNK
        first, last = part.start // chunk, -(-part.stop // chunk)
        splits = last - first
        size = max(1, self._tile // group)
        own = part.stop - n if part.causal else UNSEEN
        window = part.window if part.causal and part.window else 2 * UNSEEN
        for at in range(0, n, size):
            few = min(size, n - at)
            for split in range(splits):
                start = max(part.start, (first + split) * chunk)
                # The last query sees no row after its own.
                stop = min(part.stop, (first + split + 1) * chunk, own + at + few)
                self._tasks += (
                    *(len(self._pages), start, stop, len(self._queries) + at, few),
                    *(own + at if part.causal else own, window),
                    *(self._count + at * splits + split, splits, *part.strides),
                )
        for at, row in enumerate(part.queries):
            results.setdefault(row, []).extend(range(self._count + at * splits, self._count + (at + 1) * splits))
        away = _away(part.data, self._base)
        self._pages += [away + page for page in part.pages] if away else part.pages
        self._queries += part.queries
        self._count += n * splits


class PartTables:
    """The tasks of a step's parts, and which results each query merges, on the device.

    `tasks` int64 [tasks, FIELDS]: first page, first row, end, first of `queries`, their number, position of the first query's own
    row, rows of its window, first of its results, results from a query to the next, and the three strides. `pages` int64:
    elements from the beginning of `base`. `queries`, `targets` [targets, 3] (row of the batch, and the range of `order` that it merges) and `order` are int64.
    `count`: of results.
    """

    __slots__ = ("base", "count", "order", "pages", "queries", "targets", "tasks", "tile")

    def __init__(self, base: Tensor, sizes: TableSizes, numbers: Tensor) -> None:
        """Take all tables in one vector of int64, as `PartLists.numbers` has them."""
        self.base, self.count, self.tile = base, sizes.results, sizes.tile
        self.tasks, self.pages, self.queries, self.targets, self.order = torch.split(numbers, list(sizes[:5]))
        self.tasks, self.targets = self.tasks.view(-1, FIELDS), self.targets.view(-1, 3)

    @classmethod
    def of(cls, parts: Sequence[PagedPart], group: int) -> PartTables:
        """Make the tables of parts (see `PartLists`), in one copy to the device."""
        base = parts[0].data
        lists = PartLists(parts, group, base)
        return cls(base, lists.sizes, on_device(lists.numbers(), base.device))


class RowPlaces(NamedTuple):
    """Where new rows go. `places`, int64 [rows, 4]: the key of the first head in layer 0, in elements from the beginning of `base`,
    and elements from a layer to the next, from keys to values, from a head to the next."""

    base: Tensor
    places: Tensor


def row_places(runs: Sequence[tuple[Pages, int, int]]) -> RowPlaces:
    """Describe rows [start, stop) of contexts, one run after the other."""
    base = runs[0][0].data
    places = place_numbers(runs, base)
    return RowPlaces(base, on_device(places, base.device).view(-1, 4))


def place_numbers(runs: Sequence[tuple[Pages, int, int]], base: Tensor) -> list[int]:
    """List where rows [start, stop) of contexts are, counted from the beginning of `base`: see `RowPlaces`."""
    places: list[int] = []
    for pages, start, stop in runs:
        layer, which, head, row = pages.data.stride()[:4]
        for span in pages.spans(start, stop):
            page = _away(span.page.data, base)
            for at in range(page + span.first * row, page + span.stop * row, row):
                places += (at, layer, which, head)
    return places


def _away(data: Tensor, base: Tensor) -> int:
    """Return how many elements behind `base` a tensor begins."""
    away, rest = divmod(data.data_ptr() - base.data_ptr(), base.element_size())
    assert (rest, away % 8) == (0, 0), "pages begin at a multiple of 8 elements"
    return away
