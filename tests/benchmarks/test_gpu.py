"""`benchmarks/gpu.sh`: every part runs on the pretend device, a finished part is not run again, any other is."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _pytest.mark.expression import Expression
from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import device_tests, maps, models, part, relay, results, vllm
from benchmarks.gpu.loading import BUFFERS
from benchmarks.gpu.parts import EXACT, PARTS, SELECTING
from benchmarks.gpu.setting import Ceilings, Found, Setting
from benchmarks.papers.attncache.shapes import RATES
from scripts.gpu_tables import PAGE
from scripts.readme import REGION

from afterglow.bench.report import commit
from afterglow.config import EngineConfig
from afterglow.engine.sizes import read_buffer_bytes
from afterglow.model.families import spec_from_config
from afterglow.sim.machine.shape import ModelShape

ROOT = Path(__file__).parents[2]
SUITE = "tests-no_memory"  # runs a test of the suite on the device and one on the CPU: seconds to start each
NOTED = {"vllm"} | {name for name in PARTS if name.startswith("tests-")} - {SUITE}  # of a tiny run


def never(name: str, file: Path, shape: str) -> str | None:
    raise AssertionError(f"{name} has run again")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([name for name in PARTS if name != SUITE], id="measurements"),
        pytest.param([SUITE], id="suite", marks=pytest.mark.long),
    ],
)
def test_parts_run_and_leave_their_results(
    parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--shape", "tiny", "--out", str(tmp_path), "--parts", *parts]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.device.play_gpu", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert ("vLLM is not installed beside" in ran.stdout) is ("vllm" in parts)
    for name in parts:
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert found["part"] == name
        assert set(found["ceilings"]) == {"copy", "memory", "flops"}
        assert min(found["ceilings"].values()) > 0
        assert bool(found["note"]) == (name in NOTED) != bool(found["rows"]), name
    assert runner.main(options, never) == 0
    assert capsys.readouterr().out.count("finished before") == len(parts)
    with pytest.raises(AssertionError, match=f"{parts[0]} has run again"):
        runner.main(["--out", str(tmp_path), "--parts", *parts], never)  # results of tiny shapes are none of full ones


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (the extra gpu)")
def test_triton_steps_are_launched_ahead(tmp_path: Path) -> None:
    """Decoding is measured with the kernels, as graphs: here in Triton's interpreter."""
    options = ["--shape", "tiny", "--out", str(tmp_path), "--parts", "decode"]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.device.play_gpu", *options],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    found = json.loads((tmp_path / "decode.json").read_text())
    assert [row["requests"] for row in found["rows"]] == [1, 2]
    assert all(row["launched_ahead"] > 0.5 for row in found["rows"]), found["rows"]


class Asked(Exception):
    """What a part asks of its engine: the shape, and options."""


def asked(part: str, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelShape, dict[str, Any]]:
    """Return what a part asks of its engine, at full size."""

    def engine(shape: ModelShape, setting: Setting, **options: Any) -> None:
        raise Asked(shape, options)

    module = importlib.import_module(f"benchmarks.gpu.{PARTS[part].module}")
    monkeypatch.setattr(module, "engine_on_device", engine)
    with pytest.raises(Asked) as found:
        getattr(module, PARTS[part].function)(Setting(False), None)
    shape, options = found.value.args
    return shape, options


def device_layers(shape: ModelShape, rows: int) -> tuple[int, int]:
    """Return how many rows contexts have room for, of those that a part asks for, and how many of one layer the read buffer has."""
    row = shape.kv_bytes_per_token("bfloat16")
    budget = models.with_read_buffer((rows + models.MARGIN) * row)
    spec, _ = spec_from_config(models.config_of(shape))
    decoder: Any = SimpleNamespace(spec=spec, device=torch.device("cuda", 0), dtype=torch.bfloat16)
    buffer = read_buffer_bytes(EngineConfig(), decoder, budget)
    assert buffer > 0
    return (budget - buffer) // row, buffer * shape.layers // row


def test_all_requests_of_the_largest_batch_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of 1,024 tokens and 96 of a reply are 18 pages each."""
    shape, options = asked("decode", monkeypatch)
    assert device_layers(shape, options["device_rows"])[0] >= 128 * 18 * 64


def test_the_read_buffer_has_room_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise variants with larger buffers would be the same measurement."""
    shape, options = asked("preloading", monkeypatch)
    assert device_layers(shape, options["device_rows"])[1] >= max(BUFFERS) * 1024
    assert max(BUFFERS) == shape.layers


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have parts run on the CPU, and time nothing. Returns what they would have timed, in its order."""
    calls: list[str] = []

    def seconds(call: Any, times: int = 1) -> float:
        calls.append(str(call.args[0]) if isinstance(call, partial) else call.__name__)
        return 1.0

    for module in (relay, maps):
        monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
        monkeypatch.setattr(module, "DTYPE", torch.float32)
        monkeypatch.setattr(module, "seconds", seconds)
    monkeypatch.setattr(relay, "recorded", lambda call, times: call)
    monkeypatch.setattr(maps, "shape_of", lambda name, setting: models.shape_of(name, Setting(True)))
    return calls


def operator_row() -> None:
    options = SimpleNamespace(seed=0, heads=2, kv_heads=1, head_dim=16)
    relay.operator_row(options, 64, Setting(False), Ceilings(1.0, 1.0, 1.0))


def layers() -> None:
    maps.layers(Setting(False), Ceilings(1.0, 1.0, 1.0))


@pytest.mark.parametrize(("part", "arms"), [(operator_row, 3), (layers, 2 + len(RATES))])
def test_arms_take_turns_in_random_order(part: Callable[[], None], arms: int, timed: list[str]) -> None:
    """Otherwise one would always come behind the same other one. A seed makes the order the same in each run."""
    part()
    first = timed[:]
    rounds = [first[at : at + arms] for at in range(0, 15 * arms, arms)]
    assert all(sorted(each) == sorted(rounds[0]) for each in rounds)
    assert len(set(map(tuple, rounds))) > 1
    timed.clear()
    part()
    assert timed == first


def test_memory_of_the_ceilings_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a part begins: what it measures may be in another process."""
    done: list[str] = []
    ceilings = SimpleNamespace(show=lambda: done.append("ceilings"))
    monkeypatch.setattr(Ceilings, "measured", lambda setting: ceilings)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("given back"))
    monkeypatch.setattr(part, "about", lambda setting, ceilings: {})
    monkeypatch.setattr(vllm, "beside", lambda setting, ceilings: done.append("part") or Found([], [], "nothing"))
    part.run("vllm", tmp_path / "vllm.json", Setting(True))
    assert [each for each in done if each != "ceilings"] == ["given back", "part"]


def result(file: Path, of: str | None = None) -> None:
    wanted = {"name": "speed", "value": 1.0, "goal": ">= 2", "met": False, "within_noise": False}
    file.write_text(json.dumps({"tiny": True, "goals": [wanted], "commit": of or commit()}))


def test_parts_that_fail_are_reported_and_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def start(name: str, file: Path, shape: str) -> str | None:
        asked.append(name)
        if name == "decode" and len(asked) == 1:
            return "exit status 1"
        if name == "prefill" and len(asked) == 2:
            file.write_text('{"tiny": tr')  # it was killed while it wrote
            return None
        result(file)
        return None

    options = ["--shape", "tiny", "--out", str(tmp_path), "--parts", "decode", "prefill", "documents"]
    assert runner.main(options, start) == 1
    out = capsys.readouterr().out
    assert "decode: FAILED: exit status 1" in out
    assert "prefill: FAILED: ended without a result" in out
    assert runner.main(options, start) == 0
    assert asked == ["decode", "prefill", "documents", "decode", "prefill"]


def test_results_of_another_commit_are_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "commit", lambda: "bbb2222")
    options = ["--shape", "tiny", "--out", str(tmp_path), "--parts", "decode", "prefill"]
    result(tmp_path / "decode.json", "aaa1111")
    result(tmp_path / "prefill.json", "bbb2222")
    assert runner.main(options, lambda name, file, shape: "exit status 1") == 1
    out = capsys.readouterr().out
    assert "decode: begins again: its result is of commit aaa1111, the code of bbb2222" in out
    assert "prefill: finished before" in out
    assert "decode: speed: 1, wanted >= 2: MISSED (old: commit aaa1111)" in out
    assert "prefill: speed: 1, wanted >= 2: MISSED\n" in out
    assert runner.main(options, lambda name, file, shape: None) == 1
    assert "decode: FAILED: ended without a result" in capsys.readouterr().out
    assert runner.main(options, lambda name, file, shape: result(file, "bbb2222")) == 0
    assert "old" not in capsys.readouterr().out
    assert runner.main(options, never) == 0


def test_without_a_checkout_a_finished_part_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "commit", lambda: None)
    result(tmp_path / "decode.json", "aaa1111")
    assert runner.main(["--shape", "tiny", "--out", str(tmp_path), "--parts", "decode"], never) == 0


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    wrong = runner.in_a_process(0.001, "decode", file, "tiny")
    assert wrong is not None
    assert wrong.startswith("took more than 0.001 s; see ")
    assert not file.exists()


def test_a_part_that_ends_badly_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = partial(runner.in_a_process, 60.0, module="benchmarks.gpu.missing")
    options = ["--out", str(tmp_path), "--parts", "decode"]
    assert runner.main(options, start) == 1
    out = capsys.readouterr().out
    assert "No module named benchmarks.gpu.missing" in out
    assert f"decode: FAILED: exit status 1; see {tmp_path / 'decode.log'}" in out


def test_the_cpus_tokens_are_the_cpus_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines would take the device by themselves."""
    hidden = []

    def ran(command: list[str], env: dict[str, str], **options: Any) -> SimpleNamespace:
        hidden.append(env.get("CUDA_VISIBLE_DEVICES"))
        (tmp_path / "answers.json").write_text("{}")
        return SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(subprocess, "run", ran)
    for options in ((), ("--real-device",)):
        device_tests.answers("tests/engine/test_relay.py", "all", tmp_path / "answers.json", *options)
    assert hidden == ["", "0"]


@pytest.mark.parametrize("suite", [EXACT, SELECTING])
def test_each_test_of_a_suite_is_in_one_part(suite: str) -> None:
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-o", "addopts=-q", "-p", "no:cacheprovider", suite]
    printed = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True).stdout
    tests = [line for line in printed.splitlines() if line.startswith(f"{suite}::")]
    assert len(tests) > 50
    arguments = [part.arguments for part in PARTS.values() if part.arguments[:1] == (suite,)]
    chosen = [Expression.compile(str(only)) for _, only in arguments]
    counts = Counter(sum(only.evaluate(lambda word, test=test: word in test) for only in chosen) for test in tests)
    assert counts == {1: len(tests)}


def test_replies_are_compared_however_they_were_asked_for(tmp_path: Path) -> None:
    """By a call that waits, and by requests with sinks of their own. One that is cancelled has no tokens that could be compared."""
    test = "tests/engine/test_relay.py"
    found = device_tests.answers(test, "share_no_reads or truncated_share", tmp_path / "answers.json")
    assert {name.partition("::")[2] for name in found} == {
        "test_tenants_share_no_reads",
        "test_conversations_that_have_been_truncated_share_what_they_begin_with",
    }
    assert [len(found[name]) for name in sorted(found)] == [2 * 2 * 4, 3]
    for replies in found.values():
        assert replies == sorted(replies)
        assert all(len(tokens) in (8, 12) for _, tokens in replies)


def test_rates_are_those_of_the_rows_that_a_prefix_has_more() -> None:
    """Rows of 1,000 bytes; 64 more of them in 20 us for 32 requests, in 4 us for all together."""
    bounds = [(32 * (prefix + 128) * 1e3 / 4e6, (prefix + 32 * 128) * 1e3 / 4e6) for prefix in (64, 128)]
    times = [(600.0, 40.0), (620.0, 44.0)]
    keys = ("plain_us", "relay_us", "plain_bound_us", "relay_bound_us")
    rows = [dict(zip(keys, (*taken, *bound), strict=True)) for taken, bound in zip(times, bounds, strict=True)]
    first, second = results.rates_of_rows({"ceilings": {"memory": 4e12}, "rows": rows})
    assert "relay_tb_s" not in first
    assert second["plain_tb_s"] == pytest.approx(32 * 64 * 1e3 / 20e-6 / 1e12)
    assert second["relay_tb_s"] == pytest.approx(64 * 1e3 / 4e-6 / 1e12)
    assert second["relay_over_us"] == pytest.approx(44 - (128 + 32 * 128) / 4e3)


def test_the_page_has_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    results.main()
    regions = {region["source"]: region["text"] for region in REGION.finditer(PAGE.read_text("utf-8"))}
    assert regions["benchmarks.gpu.results"].strip() == capsys.readouterr().out.strip()
