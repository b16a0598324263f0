"""Steps that decode alone on the pretend device: recorded, replayed, and launched before the plan has asked for them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.device.test_pretend import play

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (the extra gpu)"
)


def played(scene: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, int], str]:
    """Play a scene in Triton's interpreter. Returns counts and the log; tokens are the CPU's, and no stream disturbs another."""
    found, log = found_by(scene, folder, monkeypatch)
    counts: dict[str, int] = found["counts"]
    return counts, log


def found_by(scene: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], str]:
    """Play a scene likewise, and return all that it finds."""
    theirs: dict[str, Any] = play(f"decode_scenes.{scene}", "cpu", folder / "cpu")[0]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ours, log = play(f"decode_scenes.{scene}", "cuda", folder / "cuda")
    assert ours["answers"] == theirs["answers"]
    assert ours["races"] == []
    assert "Traceback" not in log
    return ours, log


def test_triton_replies_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, log = played("passes", tmp_path, monkeypatch)
    assert counts["graphs"] >= 45
    assert counts["recordings"] < 10
    assert counts["taken"] > 0.6 * counts["launched"], "most that is launched ahead is of use"
    assert "not recorded" not in log


def test_triton_passes_wait_for_rows_that_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, _ = played("racing", tmp_path, monkeypatch)
    assert counts["graphs"] > 10
    assert counts["taken"] > 10


def test_triton_prefills_of_few_rows_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph for each layer, between which rows come and leave; where the last layer's rows are damaged on disk, what is left is
    computed kernel by kernel."""
    found, log = found_by("prefills", tmp_path, monkeypatch)
    assert found["prefills"]["launched"] >= 8
    assert found["prefills"]["unfinished"] == 1
    assert found["counts"]["recordings"] >= 4
    assert "not recorded" not in log


def test_triton_graphs_are_recorded_when_all_others_have_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, log = played("evicted", tmp_path, monkeypatch)
    assert counts["recordings"] == 2 * 3, "of each layer, for each pair of prompts"
    assert "not recorded" not in log


def test_triton_steps_that_decode_ask_for_as_much_whatever_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph, its numbers, tokens that go into it, logits, what is drawn from them, and their way out. Pages of requests that have ended
    are free, although a pass for these was launched ahead."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found, _ = play("decode_scenes.launches", "cuda", tmp_path)
    few, many = found["steps"]
    assert few == many == [[6, 1, 1, 1, 1, 0]] * 3
    assert found["held"] == 0
    assert len(found["recorded"]) >= 2
    assert set(found["recorded"]) == {1}, "a recording waits for nothing, and gives no memory back"


def test_triton_engines_record_in_streams_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so each on its own device."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert play("decode_scenes.engines", "cuda", tmp_path)[0] == [2, 2]


def test_triton_experts_are_found_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of mixtures of experts are recorded, launched ahead, and ask for as much as others, whatever the batch."""
    found, log = found_by("experts", tmp_path, monkeypatch)
    assert found["steps"] == [[[6, 1, 1, 1, 1, 0]] * 2] * 4
    assert found["counts"]["taken"] >= 5
    assert "not used" not in log


def test_triton_experts_in_blocks_are_found_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, log = found_by("experts_in_blocks", tmp_path, monkeypatch)
    assert found["steps"] == [[6, 1, 1, 1, 1, 0]] * 2
    assert found["counts"]["taken"] >= 5
    assert "weights in blocks take" in log
    assert "(MXFP4 " in log
    assert "not as CUDA graphs" not in log
    assert "not used" not in log


def test_triton_steps_of_more_rows_than_experts_take_are_no_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they choose is asked of the device, once in each layer. Steps of fewer rows are recorded as before."""
    found, log = found_by("more_than_experts_take", tmp_path, monkeypatch)
    assert "not recorded" not in log
    assert found["steps"] == [[6, 1, 1, 1, 1, 0]] * 2
    assert set(found["waits"]) == {1 + 2}


@pytest.mark.long
def test_triton_requests_come_while_others_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, _ = played("coming", tmp_path, monkeypatch)
    assert counts["taken"] > 10


def test_triton_layers_hold_the_last_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, _ = played("windows", tmp_path, monkeypatch)
    assert counts["graphs"] > 10
    assert counts["taken"] > 10


def test_triton_blocks_that_leave_stop_no_pass_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not ahead are the first pass, and two for each request that comes while others decode."""
    counts, _ = played("staggered", tmp_path, monkeypatch)
    assert counts["launched"] - counts["taken"] - counts["dropped"] <= 1 + 2 * 2
    assert counts["taken"] > 16, "blocks have left"


def test_triton_a_recording_without_memory_costs_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, log = played("no_memory_to_record", tmp_path, monkeypatch)
    assert counts["recordings"] >= 2, "it is tried again when there may be memory"
    assert counts["taken"] > 7, "passes go on without graphs"
    assert counts["graphs"] > 0
    assert log.count("are not recorded as CUDA graphs: CUDA out of memory") == 1
    assert "has no memory for" not in log


@pytest.mark.long
def test_triton_graphs_that_cannot_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, log = played("refused", tmp_path, monkeypatch)
    assert counts["graphs"] == 0
    assert counts["launched"] > 5
    assert log.count("are not recorded as CUDA graphs: CUDA error") == 1
