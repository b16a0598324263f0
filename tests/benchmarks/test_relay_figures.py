"""RelayAttention's figures on the engine: lengths from files or laws, what is run, memory as counted, and that the commands write."""

from __future__ import annotations

import json
import random
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from benchmarks.common.engines import engine_of
from benchmarks.papers.relay import operator, shared_prompt
from benchmarks.papers.relay.lengths import FOLDER, PaperLengths, fixed

from afterglow.bench.timed_requests import words
from afterglow.engine.context import DeviceContext
from afterglow.engine.engine import Engine
from afterglow.request import Output, Request
from tests.engine.conftest import FAMILIES, write_model


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / FOLDER
    folder.mkdir(parents=True)
    (folder / "ShareGPT_stat.csv").write_text("80,8\n16,800\n")
    (folder / "mmlu_prompt_stat.json").write_text("[70, 90]")
    (folder / "mmlu_5shotprefix_stat.json").write_text("[400, 600, 2000]")
    return folder.parent


def test_lengths_come_from_the_files(data: Path) -> None:
    lengths, rng = PaperLengths.of(data, 4), random.Random(1)
    assert {lengths.sharegpt(rng) for _ in range(50)} == {(20, 4), (4, 200)}, "divided, four tokens at least"
    assert {lengths.mmlu(rng) for _ in range(50)} == {(70, 32), (90, 32)}
    assert [lengths.examples(shots) for shots in (1, 3, 5)] == [120, 360, 600]


@pytest.mark.parametrize("folder", [None, "elsewhere"])
def test_lengths_come_from_laws_where_there_are_no_files(folder: str | None, tmp_path: Path) -> None:
    lengths, rng = PaperLengths.of(tmp_path / folder if folder else None, 1), random.Random(1)
    assert lengths.source == "laws"
    drawn = [lengths.sharegpt(rng) for _ in range(5000)]
    means = [statistics.mean(each) for each in zip(*drawn, strict=True)]
    assert means == pytest.approx([240, 235], rel=0.15), "RelayAttention, Table 1"
    assert lengths.examples(5) == 723


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model({**FAMILIES["llama"], "max_position_embeddings": 4096}, tmp_path / "model")


def written(path: Path, *args: str) -> dict[str, Any]:
    assert shared_prompt.main([*args, "--quick", "--threads", "1", "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_throughput_is_written_with_the_memory_that_is_held(model: Path, data: Path, tmp_path: Path) -> None:
    found = written(tmp_path / "out.json", "--model", str(model), "--system", "100", "--data", str(data))
    (row,) = found["rows"]
    assert (found["lengths"], found["divide"]) == (FOLDER, 8)
    assert row["held"]["measured"] == row["held"]["counted"] < row["held"]["apart"]
    assert row["held"]["measured"] <= row["held"]["slabs"]
    memory = [goal["met"] for goal in found["goals"] if goal["name"].startswith("bytes held")]
    assert memory == [True]
    assert all(rate > 0 for rate in row["rate"].values())


def held_behind_100_tokens(model: Path) -> dict[str, int]:
    rng, cache = random.Random(1), {"disk_cache": 0, "device_cache": 2**24, "host_cache": 2**24}
    with engine_of(str(model), threads=1, cache=cache, relay="on", max_batch=8) as engine:
        system = words(rng, engine, 100)
        return shared_prompt.memory_held(engine, system, [([*system, *words(rng, engine, 30)], 9) for _ in range(8)])


def test_a_prefix_that_requests_share_is_held_once(model: Path) -> None:
    held = held_behind_100_tokens(model)
    assert held["measured"] == pytest.approx(held["counted"], rel=0.05)
    assert held["measured"] <= held["slabs"]


def test_copies_of_what_the_plan_has_shared_are_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts the prefix once all the same."""

    def copied(self: DeviceContext, source: DeviceContext, rows: int) -> None:
        self.make_room(rows)
        for layer in range(self.shape.layers):
            self.write(layer, 0, *source.read(layer, 0, rows))
        self.rows = rows

    monkeypatch.setattr(DeviceContext, "share", copied)
    held = held_behind_100_tokens(model)
    assert held["measured"] > 1.05 * held["counted"]


def test_rates_are_those_that_relay_can_serve(model: Path, tmp_path: Path) -> None:
    found = written(
        tmp_path / "out.json", "--model", str(model), "--figure", "rate", "--system", "64", "--requests", "4"
    )
    most = next(row["most"] for row in found["rows"] if row["way"] == "relay")
    assert sorted({row["offered"] for row in found["rows"]}) == pytest.approx([0.5 * most, most])
    assert {row["way"] for row in found["rows"]} == set(shared_prompt.RATED)
    for row in found["rows"]:  # nothing but the system prompt, whose next tokens may be equal by chance
        assert row["cached"] in (range(1) if row["way"] == "recompute" else range(64, 68))
    assert len(found["goals"]) == 1


def test_full_runs_have_the_papers_points(data: Path) -> None:
    def points(figure: str) -> dict[tuple[str, int, int], int]:
        lengths = PaperLengths.of(data, 1)
        options = SimpleNamespace(figure=figure, quick=False, system=None, requests=100, lengths=lengths)
        return {(each.name, each.batch, each.system): each.count for each in shared_prompt._workloads(options)}

    found = points("sharegpt")
    assert [found["ShareGPT", 32, system] for system in (64, 512, 2048)] == [100] * 3
    assert found["ShareGPT", 1, 2048] >= 12
    shots = {("MMLU, 1-shot", 32, 120): 100, ("MMLU, 3-shot", 32, 360): 100, ("MMLU, 5-shot", 32, 600): 100}
    assert points("mmlu") == shots
    assert points("fixed") == {(f"{a} + {b}", 32, 2048): 32 for a, b in ((64, 128), (128, 256), (256, 512))}


def test_the_operator_is_judged_by_the_smaller_bound(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert operator.main(["--quick", "--heads", "2", "--kv-heads", "1", "--threads", "1", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    for row in found["rows"]:
        assert row["theory"] == min(row["counted"], row["roofline"])
        assert row["of_theory"] == pytest.approx(row["gain"] / row["theory"])
    assert [goal["name"] for goal in found["goals"]] == ["gain at prefix 2048, batch 32, 1 KV heads, of theory"]


@dataclass
class Steps:
    """Takes a step, a token for each request, once `batch` are in flight or all have been asked for."""

    batch: int
    total: int
    patience: float = 5.0  # seconds: a client that leaves places empty shall not hang

    def __post_init__(self) -> None:
        self.asked, self.change = 0, threading.Condition()
        self.left: dict[str, int] = {}
        self.take: dict[str, Callable[[Output], None]] = {}
        self.in_flight: list[int] = []  # at each step, while requests wait

    def submit(self, request: Request, take: Callable[[Output], None]) -> None:
        with self.change:
            self.asked += 1
            self.left[request.id], self.take[request.id] = request.sampling.max_tokens, take
            self.change.notify()

    def full(self) -> bool:
        return len(self.left) == self.batch or self.asked == self.total

    def run(self) -> None:
        while self.left or self.asked < self.total:
            with self.change:
                if not self.change.wait_for(self.full, self.patience):
                    self.patience = 0.0
                if self.asked < self.total:
                    self.in_flight.append(len(self.left))
                came = {name: left - 1 for name, left in self.left.items()}
                self.left = {name: left for name, left in came.items() if left}
            for name, left in came.items():
                self.take[name](Output(name, (1,), None if left else "length"))


def test_a_place_is_taken_again_as_soon_as_any_request_has_ended() -> None:
    asked = [([1], 10), *[([1], 1)] * 25]
    engine = Steps(4, len(asked))
    runs = threading.Thread(target=engine.run)
    runs.start()
    assert shared_prompt.tokens_per_second(cast(Engine, engine), asked, 4) > 0
    runs.join()
    assert len(engine.in_flight) >= 7
    assert set(engine.in_flight) == {4}, "the first one lasts ten steps, and its neighbours are followed by others"


def test_the_gains_noise_is_that_of_relay_and_of_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: dict[str, Any] = {name: SimpleNamespace(vocab_size=100) for name in shared_prompt.CACHED}
    engines["recompute"] = engines["shared"]
    rates = {
        id(engines[name]): cycle(each)
        for name, each in {"shared": (60, 80, 90), "relay": (100,), "auto": (100,)}.items()
    }
    monkeypatch.setattr(shared_prompt, "tokens_per_second", lambda engine, *_, **__: next(rates[id(engine)]))
    monkeypatch.setattr(shared_prompt, "memory_held", lambda *_: {})
    workload = shared_prompt.Workload("fixed", 2, 8, 2, fixed(4, 4))
    row = shared_prompt.point(engines, SimpleNamespace(seed=0, rounds=3), workload)
    assert row["spread"] == 0, "auto beside relay"
    samples = row["samples"]
    assert {name: len(each) for name, each in samples.items()} == {"recompute": 1, "shared": 3, "relay": 3, "auto": 3}
    gains = [relay / shared for relay, shared in zip(samples["relay"], samples["shared"], strict=True)]
    assert row["gain_spread"] == shared_prompt.spread(gains) > 0.1
