"""Options of `simulate` and `plan` that would change nothing are refused, typed or swept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_simulate import SMALL, afterglow, calibration, mooncake

AGENT = {"id": "a", "block_size": 64, "requests": [{"t": 0.0, "in": 64, "out": 2, "hash_ids": [1]}]}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--rate", "2"), "--rate does nothing with a trace that has the times of its requests"),
        (("--sweep", "rate=1,2"), "--rate does nothing with a trace that has the times of its requests"),
        (("--think", "5"), "--think does nothing with a trace, which has its users' own times"),
        (("--sweep", "disk=0,1G", "--sweep", "think=5,9"), "--think does nothing with a trace"),
        (("--network", "5"), "--network does nothing without --shared-tier"),
        (("--router", "random"), "--router does nothing with one engine; --engines N simulates several"),
    ],
)
def test_options_that_a_trace_has_no_use_for(tmp_path: Path, args: tuple[str, ...], said: str) -> None:
    ran = afterglow("simulate", mooncake(tmp_path / "trace.jsonl"), *args)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_plan_refuses_them_too() -> None:
    ran = afterglow("plan", *SMALL, "--hit-rate", "0.5", "--network", "5")
    assert (ran.code, ran.out) == (2, "")
    assert "--network does nothing without --shared-tier" in ran.err


@pytest.mark.parametrize(
    "option", [("--format", "azure"), ("--skip-bad",), ("--pace", "open"), ("--sweep", "pace=open")]
)
def test_options_that_a_preset_has_no_use_for(option: tuple[str, ...]) -> None:
    ran = afterglow("simulate", *SMALL, *option)
    assert ran.code == 2
    assert "does nothing with a preset; it is for trace files" in ran.err


def test_options_of_use_at_one_point_are_taken(tmp_path: Path) -> None:
    swept = ("--sweep", "shared-tier=0,1G", "--sweep", "network=1,9", "--conversations", "5")
    assert afterglow("simulate", *SMALL, *swept).code == 0
    trace = tmp_path / "agents.jsonl"
    trace.write_text(json.dumps(AGENT) + "\n")
    assert afterglow("simulate", str(trace), "--sweep", "rate=1,2", "--seed", "1").code == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--disk-bandwidth", "7"), "--disk-bandwidth does nothing beside --calibration"),
        (("--sweep", "disk-bandwidth=1,7"), "--disk-bandwidth does nothing beside --calibration"),
        (("--sweep", "host-link=1,7"), "--host-link does nothing beside --calibration"),
        (("--sweep", "hardware=A100-80G,H100"), "leave --calibration out, or sweep files together with it: calibration,hardware="),
        (("--sweep", "disk=0,1G", "--sweep", "devices=1,2"), "--sweep devices: all times come from --calibration"),
    ],
)  # fmt: skip
def test_what_was_measured_is_not_told_otherwise(tmp_path: Path, args: tuple[str, ...], said: str) -> None:
    measured = ("--model", "Llama-3-8B", "--calibration", calibration(tmp_path / "machine.json", "Llama-3-8B"))
    ran = afterglow("simulate", *SMALL, *measured, *args)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_calibrations_are_swept_with_their_machines(tmp_path: Path) -> None:
    one, other = (calibration(tmp_path / name, "Llama-3-8B") for name in ("one.json", "other.json"))
    swept = ("--sweep", f"calibration,hardware,devices={one}:A100-80G:1,{other}:H100:2,none:H100:2")
    ran = afterglow("simulate", *SMALL, "--conversations", "5", "--model", "Llama-3-8B", *swept)
    assert (ran.code, len(ran.out.splitlines())) == (0, 4)


def test_a_plan_with_measured_times_tries_one_machine(tmp_path: Path) -> None:
    file = calibration(tmp_path / "machine.json", "Llama-3-8B")
    measured = ("--model", "Llama-3-8B", "--calibration", file, "--conversations", "5")
    out = tmp_path / "plan.json"
    ran = afterglow("plan", *SMALL, *measured, "--ttft", "1e-9", "--json", str(out))
    assert ran.code == 2
    assert {trial["devices"] for trial in json.loads(out.read_text())["trials"]} == {1}
    refused = afterglow("plan", *SMALL, *measured, "--ttft", "1", "--max-devices", "4")
    assert "--max-devices does nothing beside --calibration" in refused.err
