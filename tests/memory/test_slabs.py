"""Small buffers are used again, and never while an array looks at them."""

from __future__ import annotations

import gc

import numpy as np
import torch

from afterglow.memory.pool import SLAB, Pool, Slabs


def test_used_again_when_nothing_looks_at_it() -> None:
    slabs = Slabs(Pool(), SLAB // 2)  # two buffers in a slab
    first, second = slabs.take(), slabs.take()
    places = {first.ctypes.data, second.ctypes.data}
    assert len(places) == 2
    rows = torch.from_numpy(first).view(torch.float32).view(-1, 4, 16)[10:20]
    rows.fill_(3.0)
    where = second.ctypes.data
    del first, second
    gc.disable()  # it must not take a collection
    try:
        third = slabs.take()
        assert third.ctypes.data == where, "of the other one a part is still looked at"
        third[:] = 0
        assert slabs.take().ctypes.data not in places
        assert (rows == 3.0).all()
        del third, rows
        assert {part.ctypes.data for part in [slabs.take() for _ in range(4)]} >= places
    finally:
        gc.enable()


def test_each_has_a_place_of_its_own() -> None:
    slabs = Slabs(Pool(), 5000)
    taken = [slabs.take() for _ in range(SLAB // 8192 + 10)]  # more than one slab
    assert all(part.nbytes == 5000 and part.ctypes.data % 4096 == 0 for part in taken)
    for number, part in enumerate(taken):
        part[:] = number % 251
    assert all((part == number % 251).all() for number, part in enumerate(taken))
    assert len({part.ctypes.data for part in taken}) == len(taken)
    large = Slabs(Pool(), 2 * SLAB).take()
    assert isinstance(large, np.ndarray)
    assert large.nbytes == 2 * SLAB


def test_slabs_that_nothing_uses_any_more_go_back_to_the_pool() -> None:
    pool = Pool()
    slabs = Slabs(pool, 5000)
    buffer = slabs.take()
    del slabs
    gc.collect()
    assert pool.free_bytes() == 0, "one of the slab's buffers is in use"
    del buffer
    gc.collect()
    assert pool.free_bytes() == SLAB
