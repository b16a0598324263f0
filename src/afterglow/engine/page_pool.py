"""Lend pages of device memory to contexts, and take them back.

Slabs of pages are taken from the system as they are needed, and used again. Contexts of models with sliding windows have pages of two
kinds: those of the layers that hold all rows, and of those that hold the last rows alone. The plan counts their bytes together. So where
the pool is at its limit, the pages of one kind move together, out of the slabs that hold the fewest, which make room for the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from weakref import WeakSet

import torch

from afterglow.engine.kv_shape import KVShape
from afterglow.engine.stats import PoolLevels
from afterglow.kernels.context_pages import PAGE_ROWS, Page, Pages, Slab
from afterglow.memory.pages import allocate
from afterglow.memory.prefault import Prefault

SLAB = 64 << 20  # bytes of a slab, but from LEAST to MOST pages
LEAST, MOST = 16, 256
PARTS = 8  # of the limit: slabs are no larger, so that two kinds of pages find room


class PagePool:
    """Pages for contexts of one shape: as long as the plan keeps its budget, of `limit` bytes in all, and at most a slab of each kind more,
    since slabs are whole."""

    def __init__(self, shape: KVShape, limit: int, prefault: Prefault | None = None) -> None:
        """`prefault`: the thread that touches memory ahead of its use, on a CPU."""
        self._shape = shape
        self._limit = limit
        self._prefault = prefault if shape.device.type == "cpu" else None
        self._slabs: dict[int, list[Slab]] = {}  # by the number of layers
        self._lists: WeakSet[Pages] = WeakSet()  # that hold its pages

    @property
    def num_bytes(self) -> int:
        """Count the bytes of all slabs."""
        return sum(slab.data.nbytes for slabs in self._slabs.values() for slab in slabs)

    def levels(self) -> PoolLevels:
        """Count the pages that are lent. Any thread may ask; between steps the numbers are exact."""
        slabs = [slab for kind in list(self._slabs.values()) for slab in list(kind)]
        return PoolLevels(
            sum(slab.used for slab in slabs),
            sum(slab.used_bytes for slab in slabs),
            sum(slab.data.nbytes for slab in slabs),
        )

    def follow(self, pages: Pages) -> None:
        """Tell a list of its pages from now on when these have moved."""
        self._lists.add(pages)

    def take(self, layers: int, count: int, after: Page | None = None) -> Iterator[Page]:
        """Lend pages of so many layers, with undefined contents, in runs as long as there are: if possible those behind a page.

        Between two of them, pages that others hold may move: nothing may know where they are but lists that the pool follows.
        Raises: `torch.OutOfMemoryError`.
        """
        slabs = self._slabs.setdefault(layers, [])
        if after is not None:
            for page in after.slab.take(count, after):
                count -= 1
                yield page
        while count:
            best = max(slabs, key=lambda slab: slab.longest(count), default=None)
            if best is None or not best.longest(count):
                best = self._add(layers)
            found = best.take(count)
            count -= len(found)
            yield from found
        spare = self._count(layers) * self._bytes(layers)
        if self._prefault is not None and sum(slab.free for slab in slabs) < LEAST and self._left >= spare:
            with contextlib.suppress(torch.OutOfMemoryError):
                self._add(layers)  # to be touched before it is used

    def give(self, page: Page) -> None:
        """Take a page back that no context holds any more."""
        page.slab.give(page)

    def shrink(self) -> None:
        """Return the memory of slabs that no context uses."""
        for slabs in self._slabs.values():
            slabs[:] = [slab for slab in slabs if slab.used]

    def _emptied(self, spared: int) -> bool:
        """Move the pages of a slab, of a kind that is not `spared`, to others of its kind. Returns whether one had room in them."""
        for layers, slabs in self._slabs.items():
            least = min(slabs, key=lambda slab: slab.used, default=None)
            if layers == spared or least is None or least.used > sum(slab.free for slab in slabs) - least.free:
                continue
            others = [slab for slab in slabs if slab is not least]
            moved = {page for pages in self._lists for page in pages if page.slab is least}
            for page in moved:
                page.move(next(slab for slab in others if slab.free))
            for pages in self._lists:
                pages.moved(moved)
            return not least.used
        return False

    def prepare(self, layers: int) -> None:
        """Have memory for the first pages before they are needed."""
        if not self._slabs.setdefault(layers, []):
            self._add(layers)

    @property
    def _left(self) -> int:
        return self._limit - self.num_bytes

    def _bytes(self, layers: int) -> int:
        """Count the bytes of a page."""
        return 2 * layers * self._shape.kv_heads * PAGE_ROWS * self._shape.head_dim * self._shape.dtype.itemsize

    def _count(self, layers: int) -> int:
        """Count the pages of a slab: as many in each, so that heads are equally far apart."""
        most = max(1, self._limit // self._bytes(layers))
        wanted = min(max(LEAST, SLAB // self._bytes(layers)), MOST, 1 + most // PARTS)
        slabs = -(-most // wanted)
        return -(-most // slabs)

    def _add(self, layers: int) -> Slab:
        """Add a slab."""
        count = self._count(layers)
        size = count * self._bytes(layers)
        if self._left < size:
            self.shrink()
        while self._left < size and self._emptied(layers):
            self.shrink()
        sizes = layers, 2, self._shape.kv_heads, count * PAGE_ROWS, self._shape.head_dim
        if self._shape.device.type == "cpu":
            try:
                memory = allocate(size)
            except OSError as error:
                raise torch.OutOfMemoryError(f"the system has no {size} bytes: {error}") from error
            if self._prefault is not None:
                self._prefault.start([memory], lambda ok: None)
            data = torch.from_numpy(memory).view(self._shape.dtype).view(sizes)
        else:
            data = torch.empty(sizes, dtype=self._shape.dtype, device=self._shape.device)
        slab = Slab(data)
        self._slabs[layers].append(slab)
        return slab
