"""Rows of contexts in pages of 64, as attention reads them and as new rows are put there.

Pages are cut out of slabs: in each layer a slab holds head by head, keys and then values, rows that follow each other. A context is a
list of pages; the first ones may be the pages of other contexts as well, if these begin with the same tokens. Pages that follow
each other in a slab are read as one run of memory, which is up to a tenth faster (`docs/log.md`).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PAGE_ROWS = 64


class Page:
    """64 rows of a slab, the `number`-th: `data` [layers, 2, kv_heads, 64, head_dim] begins at `address`. `users`: the contexts that hold
    it."""

    __slots__ = ("address", "data", "number", "slab", "users")

    def __init__(self, slab: Slab, number: int) -> None:
        self.users = 0
        self._place(slab, number)

    def move(self, slab: Slab) -> None:
        """Copy its rows to a free page of another slab, and become that page. Lists that hold it are to be told (`Pages.moved`)."""
        before, data = self.slab, self.data
        (free,) = slab.take(1)
        free.data.copy_(data)
        before.give(self)
        self._place(slab, free.number)

    def _place(self, slab: Slab, number: int) -> None:
        self.slab, self.number = slab, number
        self.data = slab.data[:, :, :, number * PAGE_ROWS : (number + 1) * PAGE_ROWS]
        self.address = self.data.data_ptr()


class Slab:
    """Pages side by side: `data` [layers, 2, kv_heads, rows, head_dim] in one run of memory, rows a multiple of 64."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self._free = bytearray(b"\1" * (data.shape[3] // PAGE_ROWS))

    @property
    def free(self) -> int:
        """Count the pages that are not lent."""
        return self._free.count(1)

    @property
    def used(self) -> int:
        """Count the pages that are lent."""
        return len(self._free) - self.free

    @property
    def used_bytes(self) -> int:
        """Count the bytes of the pages that are lent."""
        return self.data.nbytes // len(self._free) * self.used

    def take(self, most: int, after: Page | None = None) -> list[Page]:
        """Lend up to `most` free pages that follow each other: those behind a page, else the lowest run of so many, else the longest."""
        if after is not None:
            at = after.number + 1
            most = next((n for n in range(most) if self._free[at + n : at + n + 1] != b"\1"), most)
        else:
            most = min(most, max(map(len, self._free.split(b"\0"))))
            at = self._free.find(b"\1" * most)
        self._free[at : at + most] = bytes(most)
        return [Page(self, number) for number in range(at, at + most)]

    def longest(self, most: int) -> int:
        """Count the pages that `take` would lend."""
        return min(most, max(map(len, self._free.split(b"\0"))))

    def give(self, page: Page) -> None:
        """Take a page back."""
        self._free[page.number] = 1


class Span(NamedTuple):
    """Rows [first, stop) of a page, which are rows from `at` on of a context."""

    page: Page
    first: int
    stop: int
    at: int


class Pages:
    """The pages of a context in some layers, from row `first` on, a multiple of 64: those before are not held."""

    __slots__ = ("__weakref__", "_addresses", "_pages", "first")

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self._pages: list[Page] = []
        self._addresses = array("q")

    @classmethod
    def of(cls, data: Tensor) -> Pages:
        """Make pages with a copy of `data` [layers, 2, kv_heads, rows, head_dim]; rows behind are undefined."""
        layers, _, kv_heads, rows, head_dim = data.shape
        count = -(-rows // PAGE_ROWS)
        slab = Slab(data.new_empty(layers, 2, kv_heads, count * PAGE_ROWS, head_dim))
        slab.data[:, :, :, :rows] = data
        made = cls()
        for page in slab.take(count):
            made.append(page)
        return made

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, number: int) -> Page:
        return self._pages[number]

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages)

    @property
    def stop(self) -> int:
        """Return the row after the last one that has room."""
        return self.first + PAGE_ROWS * len(self._pages)

    @property
    def data(self) -> Tensor:
        """Return the rows of some page, which tell the shape, dtype and device of all."""
        return self._pages[-1].data

    @property
    def apart(self) -> int:
        """Return how many rows are from a head's first row to the next head's."""
        return self.data.stride(2) // self.data.shape[4]

    @property
    def table(self) -> int:
        """Return where the compiled kernels find the pages' addresses, counted from the page of row 0; until pages come or go."""
        return self._addresses.buffer_info()[0] - self._addresses.itemsize * (self.first // PAGE_ROWS)

    def append(self, page: Page) -> None:
        """Add a page behind the others, of a slab of the same shape."""
        assert not self._pages or page.data.stride() == self.data.stride(), "slabs of one kind have the same shape"
        page.users += 1
        self._pages.append(page)
        self._addresses.append(page.address)

    def pop(self) -> Page:
        """Remove the last page."""
        page = self._pages.pop()
        page.users -= 1
        self._addresses.pop()
        return page

    def pop_first(self) -> Page:
        """Remove the first page; rows before the next one are not held any more."""
        page = self._pages.pop(0)
        page.users -= 1
        self._addresses.pop(0)
        self.first += PAGE_ROWS
        return page

    def moved(self, pages: Collection[Page]) -> None:
        """Note that some pages have moved."""
        for number, page in enumerate(self._pages):
            if page in pages:
                self._addresses[number] = page.address

    def offsets(self, start: int, stop: int, base: Tensor) -> list[int]:
        """Return where the pages of rows [start, stop) are, in elements from the beginning of `base`."""
        from_page, to_page = (start - self.first) // PAGE_ROWS, -(-(stop - self.first) // PAGE_ROWS)
        begin, size = base.data_ptr(), base.element_size()
        return [(address - begin) // size for address in self._addresses[from_page:to_page]]

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Yield rows [start, stop), page by page."""
        held = self.first <= start and stop <= self.stop
        assert held, f"rows {start} to {stop} are not held"
        while start < stop:
            number, first = divmod(start - self.first, PAGE_ROWS)
            end = min(PAGE_ROWS, first + stop - start)
            yield Span(self._pages[number], first, end, start)
            start += end - first

    def read(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values [stop - start, kv_heads, head_dim] of some rows in one layer, head-major in memory: views where the
        pages follow each other, else copies."""
        parts = [part[layer] for part in self._runs(start, stop)]
        both = torch.cat(parts, 2) if len(parts) != 1 else parts[0]
        keys, values = both.transpose(1, 2)
        return keys, values

    def _runs(self, start: int, stop: int) -> Sequence[Tensor]:
        """Return rows [start, stop) as views [layers, 2, kv_heads, rows, head_dim], as few as there are runs of pages."""
        found: list[tuple[Slab, int, int]] = []
        for page, first, end, _ in self.spans(start, stop):
            begin = page.number * PAGE_ROWS
            if found and found[-1][0] is page.slab and found[-1][2] == begin + first:
                found[-1] = page.slab, found[-1][1], begin + end
            else:
                found.append((page.slab, begin + first, begin + end))
        return [slab.data[:, :, :, a:b] for slab, a, b in found] or [self.data[:, :, :, :0]]

    def fill(self, layer: int, start: int, rows: Tensor) -> None:
        """Put `rows` [2, kv_heads, rows, head_dim], keys and values as they lie in pages, into rows from `start` on of one layer."""
        at = 0
        for part in self._runs(start, start + rows.shape[2]):
            count = part.shape[3]
            part[layer].copy_(rows[:, :, at : at + count])
            at += count

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [rows, kv_heads, head_dim] into rows from `start` on of one layer."""
        for page, first, stop, at in self.spans(start, start + len(keys)):
            own = slice(at - start, at - start + stop - first)
            page.data[layer, 0, :, first:stop] = keys[own].transpose(0, 1)
            page.data[layer, 1, :, first:stop] = values[own].transpose(0, 1)
