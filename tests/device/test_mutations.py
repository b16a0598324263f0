"""Streams wait where they must: no race as it is, and one for each wait that is taken out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device import mutations
from tests.device.test_pretend import play


def test_no_stream_uses_memory_before_another_is_done_with_it(tmp_path: Path) -> None:
    found, log = play("races", "cuda", tmp_path)
    assert found["races"] == []
    assert "Traceback" not in log


@pytest.mark.long
def test_a_wait_that_is_missing_is_a_race(tmp_path: Path) -> None:
    (site,) = [site for site in mutations.sites() if site.path == "engine/tee.py" and "record_stream" in site.text]
    found = mutations.outcome_apart(site, "races", tmp_path / "without")
    assert "memory is used again" in found["races"][0]
