"""What a step may ask of a CUDA device: copies, waits, locked memory and launches, counted on the pretend one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device.counts import BATCHES, counted
from tests.device.test_pretend import play
from tests.device.wait_scenes import PREFIX
from tests.device.watching import Watch

LAYERS = 2
LAUNCHES = 5  # of each request in each layer: two rows stored, one attention, its result put in its place
# What steps with two prefills launch beside a graph: where their rows of two layers go, and which ones tokens are drawn from.
GRAPHS = 12
LEAVE = 2  # launches of each request whose rows leave for host memory: out of the tail buffer, and out of the device
ONE_PLACE = ["engine/transfers.py:wait"]

CHUNKS = -(-PREFIX // 64)  # of a tensor of the prefix
# Where a request that selects waits, and how often in a layer at most. With its prompt: for keys to select by, for what heads select, and
# for rows that are put together on the host, or out of chunks on the device.
SELECTS = {
    "engine/selective.py:probe_keys": 1,
    "engine/selective.py:all_keys": 1,
    "engine/selective.py:layer": 2,
    "importance/select.py:vote": 2,
    "importance/select.py:_ranking": 2,
    "importance/select.py:similarity": 2,
    "importance/prefix_loader.py:take": 2,
    "importance/prefix_loader.py:_rows_of_heads": 1,
    "importance/chunk_loader.py:learn": 1,
    "importance/chunk_cache.py:used": 1 + 2 * CHUNKS,  # that come to the device
    "importance/row_layout.py:by_hits": 1,  # guesses for the next layer
    "kernels/pick.py:picked": 3 * 3,
}
# With a token that selects anew: what heads select, which rows are missing, and these.
RENEWS = {
    "engine/selective.py:_renew": 2 * 2,
    "importance/select.py:vote": 2,
    "importance/select.py:_ranking": 2,
    "importance/select.py:similarity": 2,
    "importance/loaded_rows.py:_lacking": 3,
    "importance/loaded_rows.py:renew": 2,
    "importance/prefix_loader.py:<lambda>": 2,
    "kernels/pick.py:picked": 2 * 3,
}
IN_TIME = {"importance/row_layout.py:by_hits"}  # only where the disk is fast enough for guesses


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (the extra gpu)")
def test_triton_steps_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are sent without waiting as well, and prefills of few rows ask for little more than decoding does; so do steps with which
    rows of replies leave."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = counted("fewest_counts")
    rows: dict[str, dict[str, Any]] = found["rows"]
    assert found["waits"] == ONE_PLACE
    assert {row["synchronisations"] for row in rows.values()} == {found["most"]} == {1}
    assert {row["pinned allocations"] for row in rows.values()} == {0}
    launches = {name: row["launches"] for name, row in rows.items()}
    assert launches["prefill 2"] <= launches["decode 2"] + GRAPHS
    plain, leaving = rows["decode 2"], rows["decode, blocks leave 2"]
    assert 0 < leaving["launches"] - plain["launches"] <= LEAVE * 2
    assert 0 < leaving["copies to host"] - plain["copies to host"] <= 2


def test_steps_with_shared_rows_and_draws_wait_once() -> None:
    """Those with log-probabilities once more: they are of the tokens that were drawn."""
    assert counted("waits") == {"waits": ONE_PLACE, "most": [1, 2]}


@pytest.mark.parametrize(
    ("scene", "batches"), [("few_counts", (2, 8)), pytest.param("counts", BATCHES, marks=pytest.mark.long)]
)
def test_a_step_asks_no_more_than_this(scene: str, batches: tuple[int, ...]) -> None:
    found = counted(scene)
    rows: dict[str, dict[str, Any]] = found["rows"]
    assert len(rows) == 4 * len(batches)
    for name, row in rows.items():
        assert row["pinned allocations"] == 0, name
        assert row["synchronisations"] == 1, name
    for batch in batches:
        decode = rows[f"decode {batch}"]
        assert (decode["copies to device"], decode["copies to host"]) == (1, 1)
    assert (found["waits"], found["most"]) == (ONE_PLACE, 1)
    fewest, most = batches[0], batches[-1]
    more = rows[f"decode {most}"]["launches"] - rows[f"decode {fewest}"]["launches"]
    assert more <= LAUNCHES * LAYERS * (most - fewest)


def waited(scene: str, folder: Path) -> list[tuple[int, int, dict[str, int]]]:
    """Play a scene. Returns of each step its requests, its rows, and how often each function waited."""
    found: list[tuple[int, int, dict[str, int]]] = play(f"wait_scenes.{scene}", "cuda", folder)[0]
    return found


def test_requests_that_select_wait_in_these_places(tmp_path: Path) -> None:
    """Other tokens of theirs wait twice: for themselves, and for how many rows were ever selected."""
    seen, alone = set(), 0
    for runs, rows, waits in waited("selecting", tmp_path):
        listed = SELECTS if rows > runs else RENEWS
        assert waits.pop(*ONE_PLACE, 0) <= 2
        alone += rows == runs == 1 and not waits
        for place, count in waits.items():
            assert count <= LAYERS * listed.get(place, 0), place
            seen.add((rows > runs, place))
    listed_places = {(True, place) for place in SELECTS} | {(False, place) for place in RENEWS}
    assert {each for each in listed_places - seen if each[1] not in IN_TIME} == set(), "waits there no more"
    assert alone >= 2 * 3 * 2, "of both models, three requests, two tokens at least"


def test_truncation_by_importance_waits_for_a_requests_sums(tmp_path: Path) -> None:
    """When they come to the device, with its first rows, and when they leave it, as it ends."""
    total: dict[str, int] = {}
    for _, _, waits in waited("scores", tmp_path):
        assert waits.pop(*ONE_PLACE, 0) <= 1
        assert all(count <= 2 for count in waits.values()), "of one request once, and two may end in one step"
        total = {place: total.get(place, 0) + waits.get(place, 0) for place in total | waits}
    assert total == {"engine/scores.py:counted": 2 * 2, "engine/scores.py:end": 2 * 2}


def test_steps_with_guesses_wait_once_for_each_token(tmp_path: Path) -> None:
    steps = [step for step in waited("guesses", tmp_path) if step[0]]
    assert {place for _, _, waits in steps for place in waits} == set(ONE_PLACE)
    assert all(waits[ONE_PLACE[0]] <= rows for _, rows, waits in steps)
    assert sum(waits[ONE_PLACE[0]] for _, _, waits in steps) == 24
    assert any(rows > 1 and waits[ONE_PLACE[0]] > 1 for _, rows, waits in steps), "no guess was right"


def test_experts_that_torch_computes_are_waited_for_in_each_layer(tmp_path: Path) -> None:
    """For which experts, and for one row also for their weights."""
    groups = "model/experts.py:_by_groups"
    steps = [step for step in waited("experts", tmp_path) if step[0]]
    assert {place for _, _, waits in steps for place in waits} == {groups, *ONE_PLACE}
    for runs, _, waits in steps:
        assert waits[ONE_PLACE[0]] == 1
        assert LAYERS <= waits[groups] <= LAYERS * (2 if runs == 1 else 1)


def test_pinned_memory_is_used_again_when_its_copies_are_known_to_be_done() -> None:
    watch = Watch()

    def allocate(copied: bool = True) -> int:
        memory = torch.empty(256)
        watch.locked(memory)
        if copied:
            watch.copies_pinned(memory)
        return watch.counts["pinned allocations"]

    assert [allocate(), allocate()] == [1, 2]
    watch.wait_for_stream(watch.stream)
    assert [allocate(), allocate(copied=False), allocate()] == [2, 2, 2]
    assert allocate() == 3
