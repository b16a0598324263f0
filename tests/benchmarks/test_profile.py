"""`afterglow bench profile`: what it times adds up, and the engine is as before afterwards."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from afterglow.bench import profile
from afterglow.bench.profile import PARTS, REST, Stopwatch


def test_a_caller_is_charged_without_what_it_calls() -> None:
    watch = Stopwatch(running=True)
    inner = watch.timed("inner", lambda: time.sleep(0.02))

    def both() -> None:
        inner()
        inner()
        time.sleep(0.01)

    outer = watch.timed("outer", both)
    began = time.perf_counter()
    thread = threading.Thread(target=outer)
    thread.start()
    thread.join()
    took = time.perf_counter() - began
    outer()  # on the main thread: not timed
    assert watch.seconds["inner"] >= 0.04
    assert watch.seconds["outer"] >= 0.01
    assert sum(watch.seconds.values()) <= took


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_tables_of_a_tiny_model(
    tmp_path: Path, quantization: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of each thread's own that goes on by a millisecond when it is read: parts are counts of calls."""
    clock = threading.local()

    def perf_counter() -> float:
        clock.now = getattr(clock, "now", 0.0) + 1e-3
        return float(clock.now)

    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=perf_counter))
    before = [getattr(owner, name) for owner, name, _ in PARTS]
    found = tmp_path / "profile.json"
    try:
        arguments = ["--quick", "--model", "tiny", "--threads", "1", "--quantization", quantization]
        assert profile.main([*arguments, "--json", str(found)]) == 0
    finally:
        assert [getattr(owner, name) for owner, name, _ in PARTS] == before
    rows = json.loads(found.read_text())["rows"]
    assert len(rows) == 4
    for row in rows:
        assert {"weights' products", "attention", REST} <= row["parts"].keys()
        assert min(row["parts"].values()) > 0
        # The engine looks for work more or less often while it waits. All else is the same in each repeat.
        assert sum(row["parts"].values()) == pytest.approx(row["ms"], rel=0.2)
        assert row["bound_ms"] > 0
    assert any("cached rows" in part for part in rows[3]["parts"])
    assert "history in host memory" in capsys.readouterr().out
