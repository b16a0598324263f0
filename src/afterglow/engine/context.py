"""Hold KV on the device: rotated and ready to attend, in pages of 64 rows that contexts with the same beginning share.

A page is head-major, because a decode step then reads each head's rows as one run of memory (`docs/log.md`). Layers with a sliding
window may hold the last rows alone, in pages of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from afterglow.engine.kv_shape import KVShape
from afterglow.engine.page_pool import PagePool
from afterglow.kernels.context_pages import PAGE_ROWS, Page, Pages


class DeviceContext:
    """Hold the rotated keys and the values of one context; the first `rows` are valid.

    Layers with a window hold the last rows in `recent`, if the shape says so; all other layers hold all rows in `whole`. The page that new rows go to is no other context's.
    """

    __slots__ = ("_pool", "recent", "rows", "shape", "whole")

    def __init__(self, shape: KVShape, pool: PagePool, own_from: int = 0) -> None:
        """`own_from`: the first row that is ever held."""
        self._pool = pool
        self.shape = shape
        self.rows = 0
        first = own_from // PAGE_ROWS * PAGE_ROWS
        self.whole = Pages(first)
        self.recent = Pages(first) if shape.windowed else None
        for pages in self._groups():
            pool.follow(pages)

    def __del__(self) -> None:
        for pages in self._groups():
            while len(pages):
                self._drop(pages.pop())

    def make_room(self, stop: int, capacity: int = 0) -> None:
        """Have pages for rows up to `stop`, and in layers that hold all rows for as many as `capacity`, to be in one run. Layers
        with a window give up old rows for them.

        Raises: `torch.OutOfMemoryError`.
        """
        if self.recent is not None:
            first = self.shape.held.first(stop) // PAGE_ROWS * PAGE_ROWS
            while len(self.recent) and self.recent.first < first:
                self._drop(self.recent.pop_first())
            self.recent.first = max(self.recent.first, first)
        for pages in self._groups():
            if pages.first <= self.rows < pages.stop:
                assert pages[(self.rows - pages.first) // PAGE_ROWS].users == 1, "new rows go to a page of its own"
            wanted = stop if pages is self.recent else max(stop, capacity)
            missing = -(-(wanted - pages.stop) // PAGE_ROWS)
            if missing > 0:
                last = pages[-1] if len(pages) else None
                for page in self._pool.take(self._layers(pages), missing, last):
                    pages.append(page)

    def holds(self, stop: int) -> bool:
        """Tell whether there are pages for rows up to `stop`."""
        return all(stop <= pages.stop for pages in self._groups())

    def share(self, source: DeviceContext, rows: int) -> None:
        """Begin with the first `rows` rows of another context, as far as it holds them: their pages, and a copy of the last one's
        rows if it is not full. They are rotated to the same positions."""
        for own, others in zip(self._groups(), source._groups(), strict=True):
            own.first = others.first
            for number in range(-(-(rows - others.first) // PAGE_ROWS)):
                own.append(others[number])
        self.cut(rows)

    def shorten(self, rows: int) -> None:
        """Keep the first `rows` rows alone."""
        self.rows = rows
        for pages in self._groups():
            while len(pages) and pages.stop >= rows + PAGE_ROWS:
                self._drop(pages.pop())

    def cut(self, rows: int) -> None:
        """Keep the first `rows` rows alone, to go on from there: a last page that is not full, and that others hold too, is copied."""
        self.shorten(rows)
        for pages in self._groups():
            if rows < pages.stop and len(pages) and pages[-1].users > 1:
                (page,) = self._pool.take(self._layers(pages), 1)
                held = rows - pages.stop + PAGE_ROWS
                page.data[:, :, :, :held] = pages[-1].data[:, :, :, :held]
                self._drop(pages.pop())
                pages.append(page)

    def pages(self, layer: int) -> Pages:
        """Return the pages that hold a layer's rows; its number there is `KVShape.place`'s."""
        recent = self.recent if self.shape.place(layer)[0] else None
        return self.whole if recent is None else recent

    def read(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [stop - start, kv_heads, head_dim], views or copies; those beyond `rows` are undefined."""
        return self.pages(layer).read(self.shape.place(layer)[1], start, stop)

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [rows, kv_heads, head_dim] into rows from `start` on of one layer."""
        self.pages(layer).write(self.shape.place(layer)[1], start, keys, values)

    def _groups(self) -> Sequence[Pages]:
        if self.recent is None:
            return (self.whole,)
        return (self.whole, self.recent) if len(self.shape.windowed) < self.shape.layers else (self.recent,)

    def _layers(self, pages: Pages) -> int:
        windowed = len(self.shape.windowed)
        return windowed if pages is self.recent else self.shape.layers - windowed

    def _drop(self, page: Page) -> None:
        if not page.users:
            self._pool.give(page)
