"""AttnCache's tables on the page: errors, and hit rates that `auto` asks for."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.papers import page_attncache, page_summary


@pytest.mark.parametrize(
    ("gains", "rate"),
    [
        ({0.5: 1.05, 0.9: 1.25, 1.0: 1.3}, 0.7),
        ({0.5: 1.2, 0.9: 1.25}, 0.5),
        ({0.5: 1.05, 0.9: 1.1}, None),
        ({0.5: 1.16, 0.9: 1.14, 1.0: 1.16}, 0.95),  # noise at a low rate is no gain
    ],
)
def test_the_hit_rate_from_which_on_auto_takes_maps(gains: dict[float, float], rate: float | None) -> None:
    assert page_attncache.rate_for(gains, 1.15) == (None if rate is None else pytest.approx(rate))


def row(method: str, task: str, loss: float, **more: Any) -> dict[str, Any]:
    about = {"method": method, "task": task, "loss": loss, "chosen": True, "threshold": 0.9}
    return about | {"unseen_loss": loss, "hit_rate": 0.5, "unseen_hit_rate": 0.25} | more


def test_losses_have_the_interval_of_their_mean_and_times_are_shown_where_they_are() -> None:
    rows = [row(method, task, 2.0) for method in ("full", "AttnCache") for task in ("sts12", "stsb")]
    shown = page_attncache.attncache("m", {"rows": rows, "clock": None})
    assert "| AttnCache | 0.9 to 2.3 at 30 % | 2.0 | 2.0 to 2.0 | 2.0 | 50% | 25% |\n" in shown
    assert shown.endswith("\nTimes were not measured.\n")
    known = [one | {"loss_error": error} for one, error in zip(rows, (0.0, 0.0, 3.0, 4.0), strict=True)]
    shown = page_attncache.attncache("m", {"rows": known, "clock": None})
    assert "| 2.0 ± 4.9 | 2.0 to 2.0 |" in shown
    assert "| full |  | 2.0 | 2.0 to 2.0 |" in shown
    timed = [one | {"speedup_attention": 1.5, "speedup_whole": 1.25} for one in known]
    shown = page_attncache.attncache("m", {"rows": timed, "clock": "wall clock"})
    assert "| 25% | 1.50 | 1.25 |" in shown
    assert "Times: wall clock." in shown


def test_the_summary_tells_no_time_that_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    real = page_summary.read

    def untimed(file: str) -> dict[str, Any]:
        found = real(file)
        for one in found["rows"] if file == "attncache_decoder" else ():
            one.pop("speedup_whole", None)
        return found

    assert "times as fast, at" in page_summary.in_short()
    monkeypatch.setattr(page_summary, "read", untimed)
    assert "Whole passes gain little" not in page_summary.in_short()
    assert "of its maps layer by layer, at" in page_summary.in_short()
