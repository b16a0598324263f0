"""Streams wait where they must: no race as it is, and one for each wait that is taken out."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.device import mutations
from tests.device.test_pretend import play


@pytest.mark.parametrize("scene", ["races", "sending", "read_ahead", "full_buffer", "no_memory"])
def test_no_stream_uses_memory_before_another_is_done_with_it(scene: str, tmp_path: Path) -> None:
    found, log = play(scene, "cuda", tmp_path)
    assert found["races"] == []
    assert found.get("staged", 0) == 0
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("file", "wait", "scene", "race"),
    [
        pytest.param("row_exit", "wait_event(last)", "races", "memory is used again", marks=pytest.mark.long),
        ("row_exit", "wait_event(first.event)", "full_buffer", "memory is used again"),
        pytest.param("gather", "wait(self._last)", "no_memory", "does not wait for copy_", marks=pytest.mark.long),
        pytest.param("read_buffer", "wait(self._left)", "read_ahead", "the store fills slots", marks=pytest.mark.long),
        ("transfers", "wait(own.sent)", "sending", "cat on stream -1"),  # written to as `out=`
        pytest.param("transfers", "event.synchronize()", "sending", "cat on stream -1", marks=pytest.mark.long),
        pytest.param(
            *("transfers", "wait(left)", "interpreted decode_scenes.racing", "copy_ on stream"),
            marks=[pytest.mark.long, pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")],
            id="triton",
        ),
        pytest.param(
            *("prefill_pass", "wait_event(sent)", "interpreted decode_scenes.halves", "does not wait for copy_"),
            marks=pytest.mark.skipif(find_spec("triton") is None, reason="no Triton"),
            id="triton halves",
        ),
    ],
)
def test_a_wait_that_is_missing_is_a_race(file: str, wait: str, scene: str, race: str, tmp_path: Path) -> None:
    (site,) = [site for site in mutations.sites() if site.path == f"engine/{file}.py" and wait in site.text]
    found = mutations.apart(f"outcome(Site(*{tuple(site)}), {scene!r}, 'cuda', Path({str(tmp_path / 'without')!r}))")
    assert any(race in each for each in found["races"])


@pytest.mark.parametrize(
    "scene",
    [
        "memo_scenes.maps",
        "model_scenes.families",
        *(pytest.param(scene, marks=pytest.mark.long) for scene in ("agreeing", "grammar")),
    ],
)
def test_answers_are_the_cpus_and_no_index_comes_from_the_host(scene: str, tmp_path: Path) -> None:
    assert mutations.apart(f"Scenes(Path({str(tmp_path)!r})).expected({scene!r})")


@pytest.mark.parametrize("move", ["rows.to(loaded.keys.device)", "keys.to(loaded.keys.device)"])
@pytest.mark.long
def test_a_move_that_is_missing_is_noticed(move: str, tmp_path: Path) -> None:
    (site,) = [site for site in mutations.sites() if site.path == "engine/selective.py" and site.text == move]
    assert mutations.apart(f"Scenes(Path({str(tmp_path)!r})).noticed(Site(*{tuple(site)}))") is not None
