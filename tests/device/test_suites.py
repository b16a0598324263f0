"""The engine's own suites on the pretend CUDA device: they pass, and every reply has the tokens that it has on the CPU. With Triton's
kernels, in its interpreter, and without."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
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


WAYS = [
    False,
    pytest.param(
        True, id="triton", marks=pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton")
    ),
]


def answers(suite: str, only: str, path: Path, *options: str) -> dict[str, Any]:
    """Run a suite in a process of its own, and return the tokens of its replies by test. On the device, Triton's kernels run where its
    interpreter is asked for."""
    ran = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "tests.device.plugin", "-p", "no:cacheprovider", "--answers", str(path),
            *options, "-m", "not long", "-k", only, "--timeout", "1800", suite,
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


def same_answers(suite: str, only: str, folder: Path) -> None:
    ours = answers(suite, only, folder / "cuda.json", "--pretend-device")
    theirs = answers(suite, only, folder / "cpu.json")
    assert ours
    assert all(theirs[test] == found for test, found in ours.items())


def test_a_prompt_that_is_cut_is_the_cpus(tmp_path: Path) -> None:
    same_answers("tests/engine/test_truncation.py", "test_learned_positions", tmp_path)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kernels", WAYS)
@pytest.mark.parametrize("suite", SUITES)
def test_suites_pass(suite: str, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    answers(suite, f"{OF_ONE_FAMILY} and not ({OTHERS})", tmp_path / "cuda.json", "--pretend-device")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kernels", WAYS)
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_reuse_has_the_tokens_of_the_cpu(
    tier: str, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    same_answers("tests/engine/test_exact_reuse.py", f"full_prefill and {tier} and (llama or phi)", tmp_path)
