"""Keep large memory that was given back for the next user, so that few ever touch new pages.

2,048 rows of `bench-100m` from host memory into a context: 27 ms in plain pages, 10 in new huge ones, 6 in used ones. Decoding,
with weights in huge pages: 14.8 instead of 15.9 ms a token.

Contexts of new requests would still be new memory until the first ones are given up, and each prefill of 1,024 tokens
(`bench-56m`) spent 60 ms of 240 on that. So a little of the kind of memory that contexts take is touched ahead of its use.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from typing import Final

import numpy as np

from afterglow.memory.pages import HUGE_PAGE, Bytes, allocate, round_up
from afterglow.memory.prefault import Prefault

MAX_FREE: Final = 512 << 20  # bytes that a pool keeps for later
AHEAD: Final = 64 << 20  # bytes that are touched before they are used
SLAB: Final = 16 << 20  # bytes that are cut into small buffers
_WASTE: Final = 1.5  # memory that is so many times as large as needed is left for others
_MARGIN: Final = 1.25  # the next context is expected to be so many times as large as the last one


class Pool:
    """Lends memory of any size from `LARGE` on.

    Memory comes back when the last array or tensor over it is gone. That may happen at any moment and in any thread, also
    within `take`, where the garbage collector runs.
    """

    def __init__(self, prefault: Prefault | None = None, *, max_free: int = MAX_FREE, ahead: int = AHEAD) -> None:
        """`prefault`: the thread that prepares memory ahead of its use; None: no memory is prepared."""
        self._prefault = prefault
        self._max_free = max_free
        self._ahead = ahead
        self._returned: deque[Bytes] = deque()
        self._free: list[Bytes] = []  # the oldest first
        self._lock = threading.Lock()
        self._preparing = prefault is None
        self._wanted = 0  # bytes that were taken last with `again`

    def take(self, num_bytes: int, again: bool = False) -> Bytes:
        """Lend memory with undefined contents: uint8 [num_bytes]. `again`: more of about that size will be needed.

        Raises:
            OSError: the system has no memory.
        """
        with self._lock:
            self._collect()
            fitting = self._fitting(num_bytes)
            found = min(fitting, key=len) if fitting else None
            if found is not None:
                self._remove(found)
            prepare = again and not self._preparing
            if again:
                self._wanted = num_bytes
                self._preparing = True
        if prepare:
            self._prepare()
        return self._lend(allocate(round_up(num_bytes)) if found is None else found, num_bytes)

    def free_bytes(self) -> int:
        """Count the bytes that are kept for later."""
        with self._lock:
            self._collect()
            return sum(map(len, self._free))

    def _lend(self, memory: Bytes, num_bytes: int) -> Bytes:
        # Over a memoryview: slices and views of an array over another array would refer to that one, and not to the lease.
        lease = np.frombuffer(memory.data, np.uint8, num_bytes)
        weakref.finalize(lease, self._give_back, memory).atexit = False
        return lease

    def _give_back(self, memory: Bytes) -> None:
        self._returned.append(memory)
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        while sum(map(len, self._free)) > self._max_free:
            del self._free[0]

    def _remove(self, memory: Bytes) -> None:
        del self._free[next(at for at, free in enumerate(self._free) if free is memory)]

    def _fitting(self, num_bytes: int) -> list[Bytes]:
        return [memory for memory in self._free if num_bytes <= len(memory) <= _WASTE * num_bytes + HUGE_PAGE]

    def _lacks(self) -> bool:
        """Decide whether there should be more free memory of the size that was taken last."""
        size = _MARGIN * self._wanted
        room = sum(map(len, self._free)) + size <= self._max_free / 2
        return room and sum(map(len, self._fitting(self._wanted))) + size <= max(self._ahead, size)

    def _prepare(self) -> None:
        """Touch new memory in the background, a piece at a time, while too little is free."""
        assert self._prefault is not None
        with self._lock:
            self._collect()
            if not self._lacks():
                self._preparing = False
                return
            size = round_up(int(_MARGIN * self._wanted))
        try:
            memory = allocate(size)
        except OSError:  # no memory, or no more mappings: it is not tried again
            return
        self._prefault.start([memory], functools.partial(self._prepared, memory))

    def _prepared(self, memory: Bytes, ok: bool) -> None:
        self._give_back(memory)
        if ok:  # where the system cannot do this it is not tried again
            self._prepare()


class Slabs:
    """Lends page-aligned buffers of one size, cut out of larger memory of a pool.

    New memory costs more than a read from disk into it: of 10 MB a request, 18 ms of its pages and a copy. A buffer is used
    again when no array or tensor over it is left. None goes back to the pool, so that there are as many buffers as have been in
    use at once.
    """

    def __init__(self, pool: Pool, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._pool = pool
        self._stride = round_up(num_bytes, 4096)
        self._free: deque[memoryview] = deque()  # filled from any thread, when the last view of a buffer goes

    def take(self) -> Bytes:
        """Lend a buffer with undefined contents: uint8 [num_bytes]. Only for one thread at a time.

        Raises:
            OSError: the system has no memory.
        """
        if not self._free:
            slab = self._pool.take(max(1, SLAB // self._stride) * self._stride).data
            self._free.extend(slab[at : at + self.num_bytes] for at in range(0, len(slab), self._stride))
        memory = self._free.pop()  # the one that was used last is still in the processor's caches
        lease = np.frombuffer(memory, np.uint8)
        weakref.finalize(lease, self._free.append, memory).atexit = False
        return lease
