"""Small buffers are used again, and never while an array looks at them."""

from __future__ import annotations

import gc

import numpy as np
import torch

from afterglow.memory.reused_buffers import PIECE, Buffers


def test_used_again_when_nothing_looks_at_it() -> None:
    buffers = Buffers(PIECE // 2)  # two in a piece
    first, second = buffers.take(), buffers.take()
    places = {first.ctypes.data, second.ctypes.data}
    assert len(places) == 2
    rows = torch.from_numpy(first).view(torch.float32).view(-1, 4, 16)[10:20]
    rows.fill_(3.0)
    where = second.ctypes.data
    del first, second
    gc.disable()  # it must not take a collection
    try:
        third = buffers.take()
        assert third.ctypes.data == where, "of the other one a part is still looked at"
        third[:] = 0
        assert buffers.take().ctypes.data not in places
        assert (rows == 3.0).all()
        del third, rows
        assert {part.ctypes.data for part in [buffers.take() for _ in range(4)]} >= places
    finally:
        gc.enable()


def test_each_has_a_place_of_its_own() -> None:
    buffers = Buffers(5000)
    taken = [buffers.take() for _ in range(PIECE // 8192 + 10)]  # more than one piece
    assert all(part.nbytes == 5000 and part.ctypes.data % 4096 == 0 for part in taken)
    for number, part in enumerate(taken):
        part[:] = number % 251
    assert all((part == number % 251).all() for number, part in enumerate(taken))
    assert len({part.ctypes.data for part in taken}) == len(taken)
    large = Buffers(2 * PIECE).take()
    assert isinstance(large, np.ndarray)
    assert large.nbytes == 2 * PIECE
