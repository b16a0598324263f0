"""The matrix is complete, and `docs/faults.md` has its lines."""

from __future__ import annotations

import pytest

from tests.faults import report, test_server_faults
from tests.faults.test_kill import FAULT as KILL
from tests.faults.test_matrix import CELLS
from tests.faults.victim import POINTS


def test_every_cell_is_played_or_explained() -> None:
    played = {(cell.fault, cell.phase) for cell in CELLS} | {(KILL, point.phase) for point in POINTS}
    wanted = {(fault, phase) for fault in report.FAULTS for phase in report.PHASES}
    assert played | report.NOT_PLAYED.keys() == wanted
    assert not played & report.NOT_PLAYED.keys()
    assert len(test_server_faults.CELLS) == 6


@pytest.mark.skipif(report.WRITE, reason="it is about to be written")
def test_the_table_has_every_line_and_no_other() -> None:
    assert report.missing_or_outdated() == set()
