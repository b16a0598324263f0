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

from afterglow.kernels.context_pages import Pages

CHUNK = 256  # rows of a task, where few queries read them
WIDE_CHUNK = 512  # where many do: what tasks write stays small beside what they read
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


class PartTables:
    """The tasks of a step's parts, and which results each query merges.

    `tasks` int64 [tasks, FIELDS]: first page, first row, end, first of `queries`, their number, position of the first query's own
    row, rows of its window, first of its results, results from a query to the next, and the three strides. `pages` int64:
    elements from the beginning of `base`. `queries`, `targets` [targets, 3] (row of the batch, and the range of `order` that it merges) and `order` are int64.
    `count`: of results.
    """

    __slots__ = ("base", "count", "order", "pages", "queries", "targets", "tasks", "tile")

    def __init__(self, parts: Sequence[PagedPart], group: int) -> None:
        """Take at least one part, none empty. `group`: query heads that share a KV head."""
        self.base = parts[0].data
        most = max(len(part.queries) for part in parts) * group
        sizes = tiles(self.base.dtype, self.base.shape[4])
        self.tile = next((size for size in sizes if most <= size), sizes[-1])
        tasks: list[int] = []
        pages: list[int] = []
        queries: list[int] = []
        results: dict[int, list[int]] = {}
        self.count = 0
        for part in parts:
            self._add(part, group, tasks, pages, queries, results)
        order = [result for found in results.values() for result in found]
        targets: list[int] = []
        at = 0
        for row, found in results.items():
            targets += (row, at, at + len(found))
            at += len(found)
        # One copy to the device for all tables.
        lists = (tasks, pages, queries, targets, order)
        together = torch.tensor([number for each in lists for number in each], dtype=torch.int64).to(self.base.device)
        self.tasks, self.pages, self.queries, self.targets, self.order = torch.split(
            together, [len(each) for each in lists]
        )
        self.tasks, self.targets = self.tasks.view(-1, FIELDS), self.targets.view(-1, 3)

    def _add(
        self,
        part: PagedPart,
        group: int,
        tasks: list[int],
        pages: list[int],
        queries: list[int],
        results: dict[int, list[int]],
    ) -> None:
        n = len(part.queries)
        wide = not part.causal and n * group > NARROW
        chunk = WIDE_CHUNK if wide else CHUNK
        first, last = part.start // chunk, -(-part.stop // chunk)
        splits = last - first
        size = max(1, self.tile // group)
        own = part.stop - n if part.causal else UNSEEN
        window = part.window if part.causal and part.window else 2 * UNSEEN
        for at in range(0, n, size):
            few = min(size, n - at)
            for split in range(splits):
                start = max(part.start, (first + split) * chunk)
                stop = min(part.stop, (first + split + 1) * chunk)
                tasks += (
                    *(len(pages), start, stop, len(queries) + at, few, own + at if part.causal else own, window),
                    *(self.count + at * splits + split, splits, *part.strides),
                )
        for at, row in enumerate(part.queries):
            results.setdefault(row, []).extend(range(self.count + at * splits, self.count + (at + 1) * splits))
        away = _away(part.data, self.base)
        pages += [away + page for page in part.pages] if away else part.pages
        queries += part.queries
        self.count += n * splits


class RowPlaces(NamedTuple):
    """Where new rows go. `places`, int64 [rows, 4]: the key of the first head in layer 0, in elements from the beginning of `base`,
    and elements from a layer to the next, from keys to values, from a head to the next."""

    base: Tensor
    places: Tensor


def row_places(runs: Sequence[tuple[Pages, int, int]]) -> RowPlaces:
    """Describe rows [start, stop) of contexts, one run after the other."""
    base = runs[0][0].data
    places: list[int] = []
    for pages, start, stop in runs:
        layer, which, head, row = pages.data.stride()[:4]
        for span in pages.spans(start, stop):
            page = _away(span.page.data, base)
            for at in range(page + span.first * row, page + span.stop * row, row):
                places += (at, layer, which, head)
    return RowPlaces(base, torch.tensor(places, dtype=torch.int64).to(base.device).view(-1, 4))


def _away(data: Tensor, base: Tensor) -> int:
    """Return how many elements behind `base` a tensor begins."""
    away, rest = divmod(data.data_ptr() - base.data_ptr(), base.element_size())
    assert (rest, away % 8) == (0, 0), "pages begin at a multiple of 8 elements"
    return away
