"""The engine's suites on the device, with the tokens that the CPU gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from afterglow.bench.report import COUNTED, goal
from benchmarks.gpu.setting import ROOT, Ceilings, Found, Setting, table

# As in tests/device/test_suites.py: families that differ in nothing that a device sees, kernels and files alone.
LEFT_OUT = (
    "mistral or qwen2 or qwen3 or falcon or opt or cohere or glm4 or smollm3 or gemma3_text or mixtral or compiled or True or "
    "all_levels or kill_9 or finds_the_facts"
)
# Tests whose tokens are each device's own: of random draws; of weights in 8 and 4 bits, for which the CPU rounds what they are
# multiplied by as well.
OTHERWISE = ("draws_the_same_again", "test_quantized.py")
FEW = "test_room_that_cannot_be_had"  # of one suite, to see that the way there works


def suite(setting: Setting, ceilings: Ceilings, path: str, tests: str = "") -> Found:
    """Run a suite with the device as the default, or those of its `tests` that pytest finds by that expression, and compare replies
    with those of the CPU.

    Raises: RuntimeError, where a test fails on the device.
    """
    if setting.tiny and "no_memory" not in path:
        return Found([], [], f"{path}: left out of a tiny run")
    only = setting.of(f"not ({LEFT_OUT})" + (f" and ({tests})" if tests else ""), FEW)
    with tempfile.TemporaryDirectory(prefix="afterglow-bench-") as folder, ThreadPoolExecutor(1) as beside:
        on_cpu = beside.submit(answers, path, only, Path(folder) / "cpu.json")
        ours = answers(path, only, Path(folder) / "device.json", setting.tests_on)
        theirs = on_cpu.result()
    ours = {test: found for test, found in ours.items() if not any(name in test for name in OTHERWISE)}
    others = [test for test, found in ours.items() if theirs.get(test) != found]
    same = len(ours) - len(others)
    rows = [{"suite": path, "tests_with_replies": len(ours), "same_tokens": same, "others": ", ".join(others)}]
    table("the engine's tests on the device", rows)
    return Found(rows, [goal(f"{path}: tests whose tokens are the CPU's", same, len(ours), least=True, spread=COUNTED)])


def answers(path: str, only: str, into: Path, *options: str) -> dict[str, Any]:
    """Run a suite in a process of its own. Returns the tokens of its replies by test. Raises: RuntimeError."""
    ran = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "tests.device.plugin", "-p", "no:cacheprovider", "--answers", str(into),
            *options, "-m", "not long", "-k", only, path,
        ],
        capture_output=True, text=True, cwd=ROOT,
        env=os.environ if options else {**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # the CPU's tokens: engines would take the device
    )  # fmt: skip
    print(ran.stdout[-6000:], flush=True)
    if ran.returncode != 0:
        raise RuntimeError(f"{path} {' '.join(options) or 'on the CPU'}: pytest ended with {ran.returncode}")
    found: dict[str, Any] = json.loads(into.read_text())
    return found
