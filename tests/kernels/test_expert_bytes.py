"""Of a mixture of experts, the bytes that a step reads are those of the experts that its rows choose: counted by the system."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from afterglow.kernels.block import Block, ExpertPanels, Pair
from afterglow.kernels.built import native
from afterglow.kernels.matrix import Panels
from afterglow.kernels.passes import rms_norm
from afterglow.memory.pages import give_back

MAPS = Path("/proc/self/smaps")
COUNT, CHOSEN, HIDDEN, WIDTH = 16, 2, 256, 1024
SLOT = 2 * WIDTH * HIDDEN * 4  # bytes of an expert's first matrix: 2 MiB, the most that systems map at a time

pytestmark = pytest.mark.skipif(native() is None or not MAPS.exists(), reason="needs compiled kernels, and Linux")


class MappedPanels(Panels):
    """A matrix whose panels lie in a mapped file."""

    __slots__ = ()

    def __init__(self, panels: Tensor) -> None:
        library = native()
        assert library is not None
        self._library, self._width = library, library.width
        self.outputs, self.inputs = 2 * WIDTH, HIDDEN
        self._panels, self._bias = panels, None
        self.matrix = library.new("afterglow_matrix *", (panels.data_ptr(), 0, HIDDEN, 2 * WIDTH, 0))


def bytes_read(file: Path) -> int:
    """How much of a mapped file has been touched since its pages were given back."""
    about = MAPS.read_text().partition(str(file))[2]
    found = re.search(r"Rss: +(\d+) kB", about)
    assert found is not None
    return int(found[1]) * 1024


def test_they_follow_the_distinct_experts(tmp_path: Path) -> None:
    file = tmp_path / "experts"
    with file.open("wb") as empty:
        empty.truncate(COUNT * SLOT)
    mapped = torch.from_file(str(file), shared=True, size=COUNT * SLOT // 4)
    narrow = Panels(torch.ones(HIDDEN, WIDTH))
    generator = torch.Generator().manual_seed(0)
    router = Panels(torch.randn(COUNT, HIDDEN, generator=generator))
    pairs = [Pair(MappedPanels(panels), narrow) for panels in mapped.split(SLOT // 4)]
    norm = torch.ones(HIDDEN), 1e-5
    block = Block(Panels(torch.eye(HIDDEN)), norm, ExpertPanels(router, pairs, CHOSEN, True), norm)
    distinct = []
    for rows, different in ((1, 1), (8, 1), (8, 2), (8, 8), (300, 300)):
        x = torch.randn(different, HIDDEN, generator=generator).repeat(rows // different, 1)
        chosen = router(rms_norm(x, *norm)).topk(CHOSEN).indices.unique()
        give_back(mapped.data_ptr(), COUNT * SLOT)
        assert bytes_read(file) == 0
        block(x, torch.zeros(rows, HIDDEN))
        assert bytes_read(file) == len(chosen) * SLOT
        distinct.append(len(chosen))
    assert distinct[:2] == [CHOSEN, CHOSEN], "eight equal rows read what one reads"
    assert CHOSEN < distinct[2] < distinct[3] < COUNT == distinct[4]
