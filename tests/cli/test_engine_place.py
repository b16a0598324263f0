"""In which process the engine of `afterglow serve` is: with `auto`, apart from the server where the model is on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.test_pretend import play


def test_auto_gives_the_engine_of_a_gpu_a_process_of_its_own(tmp_path: Path) -> None:
    """The device is pretended, in both processes. An encoder has no engine, and stays."""
    theirs, _ = play("serve_scenes.placed", "cpu", tmp_path / "cpu")
    ours, log = play("serve_scenes.placed", "cuda", tmp_path / "cuda")
    assert [apart for apart, _ in theirs] == [False, False, False]
    assert [apart for apart, _ in ours] == [True, False, False]
    assert [answer for _, answer in ours[:2]] == [answer for _, answer in theirs[:2]]
    assert ours[2][1] == pytest.approx(theirs[2][1], abs=1e-5)
    assert "Traceback" not in log
