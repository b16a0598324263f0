"""The engine's own suites on the pretend CUDA device: they pass, and every reply has the tokens that it has on the CPU. With Triton's
kernels, in its interpreter, and without."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OF_ONE_FAMILY = (
    "not (mistral or qwen2 or qwen3 or falcon or opt or cohere or glm4 or smollm3 or gemma3_text or mixtral)"
)
# Kernels and files alone, which know no device; facts that are only found by a whole benchmark.
OTHERS = "compiled or True or all_levels or kill_9 or finds_the_facts"

SUITES = (
    "tests/engine/test_exact_reuse.py",
    "tests/engine/test_relay.py",
    "tests/engine/test_selecting.py",
    "tests/engine/test_selecting_beside.py",
    "tests/engine/test_truncation.py",
    "tests/engine/test_no_memory.py",
    "tests/engine/test_quantized.py",
    "tests/engine/test_eight_bits.py",
    "tests/faults/test_engine_faults.py",
)

# Of these suites, what takes a minute at most, on the device and then on the CPU.
QUICK = (
    "tests/engine/test_relay.py::test_prefixes_from_the_disk_are_shared_too",
    "tests/engine/test_selecting.py::test_a_selection_is_what_it_is_in_memory[llama-disk]",
    "tests/engine/test_no_memory.py::test_the_newest_wait_and_every_answer_is_right[1]",
    "tests/engine/test_eight_bits.py::test_what_is_reused_are_rounded_rows[llama-host]",
    "tests/engine/test_quantized.py::test_reuse_is_as_near_as_rounding_lets_it[llama-disk]",
    "tests/engine/test_truncation.py::test_the_oldest_half_goes_wherever_turns_end[device]",
    "tests/engine/test_truncation.py::test_learned_positions_are_recomputed_and_say_so",
    "tests/faults/test_engine_faults.py::test_flipped_byte[0.5]",
    "tests/faults/test_engine_faults.py::test_deleted_file",
)
OTHERWISE = "test_quantized"  # of int8, a CPU rounds what weights are multiplied with as well

WAYS = [
    False,
    pytest.param(
        True, id="triton", marks=pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton")
    ),
]


def answers(tests: Sequence[str], only: str, path: Path, *options: str) -> dict[str, Any]:
    """Run suites, or single tests, in a process of their own, and return the tokens of replies by test. On the device, Triton's kernels
    run where its interpreter is asked for."""
    ran = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "tests.device.plugin", "-p", "no:cacheprovider", "--answers", str(path),
            *options, "-m", "not long", "-k", only, "--timeout", "1800", *tests,
        ],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-6000:]
    if options:
        launches = re.search(r"^(\d+) launches of kernels of Triton's$", ran.stdout, re.MULTILINE)
        assert launches is not None
        assert (int(launches[1]) > 0) is (os.environ.get("TRITON_INTERPRET") == "1")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def same_answers(tests: Sequence[str], only: str, folder: Path) -> set[str]:
    """Run tests on the device and on the CPU: they pass, and their tokens are the same. Returns the tests with replies."""
    ours = answers(tests, only, folder / "cuda.json", "--pretend-device")
    theirs = answers(tests, only, folder / "cpu.json")
    assert ours
    assert [test for test, found in ours.items() if theirs[test] != found and OTHERWISE not in test] == []
    return set(ours)


@pytest.mark.timeout(900)
def test_quick_ones_have_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    assert same_answers(QUICK, "", tmp_path) >= {test for test in QUICK if OTHERWISE not in test}


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kernels", WAYS)
@pytest.mark.parametrize("suite", SUITES)
def test_suites_pass(suite: str, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    answers([suite], f"{OF_ONE_FAMILY} and not ({OTHERS})", tmp_path / "cuda.json", "--pretend-device")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kernels", WAYS)
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_reuse_has_the_tokens_of_the_cpu(
    tier: str, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    same_answers(["tests/engine/test_exact_reuse.py"], f"full_prefill and {tier} and (llama or phi)", tmp_path)
