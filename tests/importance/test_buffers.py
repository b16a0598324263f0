"""Memory for chunks is used again, and never while somebody looks at it."""

from __future__ import annotations

import gc

import numpy as np
import torch

from afterglow.importance import buffers
from afterglow.importance.buffers import Buffers
from afterglow.store.layout import ALIGNMENT


def test_used_again_when_nobody_looks_at_it() -> None:
    made = Buffers(buffers.SLAB // 2)  # two of them in what is asked for at a time
    first, second = made.take(), made.take()
    places = {first.ctypes.data, second.ctypes.data}
    assert len(places) == 2
    rows = torch.from_numpy(first).view(torch.float32).view(-1, 4, 16)[10:20]
    rows.fill_(3.0)
    where = second.ctypes.data
    del first, second
    gc.disable()  # it must not take a collection
    try:
        third = made.take()
        assert third.ctypes.data == where, "of the other one a part is still looked at"
        third[:] = 0
        assert made.take().ctypes.data not in places
        assert (rows == 3.0).all()
        del third, rows
        assert {part.ctypes.data for part in [made.take() for _ in range(4)]} >= places
    finally:
        gc.enable()


def test_each_has_a_place_of_its_own() -> None:
    made = Buffers(5000)
    taken = [made.take() for _ in range(buffers.SLAB // 8192 + 10)]  # more than one slab
    assert all(part.nbytes == 5000 and part.ctypes.data % ALIGNMENT == 0 for part in taken)
    for number, part in enumerate(taken):
        part[:] = number % 251
    assert all((part == number % 251).all() for number, part in enumerate(taken))
    assert len({part.ctypes.data for part in taken}) == len(taken)
    large = Buffers(2 * buffers.SLAB).take()
    assert isinstance(large, np.ndarray)
    assert large.nbytes == 2 * buffers.SLAB
