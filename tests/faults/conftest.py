"""`docs/faults.md` is written, if that was asked for, when all its lines have been played."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import report


@pytest.fixture(scope="session", autouse=True)
def table() -> Iterator[None]:
    yield
    if report.WRITE:
        from tests.faults import test_kill, test_matrix, test_server_faults  # noqa: F401  (their lines)

        report.write()
