"""Triton's kernels in its interpreter, on the CPU, where Triton is installed; and the gate that they are behind, everywhere."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from afterglow.kernels import gate
from afterglow.kernels.device_reads import possible
from afterglow.kernels.gate import Gate, agree, refused
from afterglow.kernels.paged_parts import suited
from tests import doors

CHECKS = [
    "attention",
    "pages",
    "alone",
    "rows",
    "gather",
    "far",
    "merges",
    "old",
    "products",
    "blocks",
    "passes",
    "experts",
    "column_sums",
    "trials",
]


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (the extra gpu)")
def test_a_kernel_is_the_formula(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_checks", name],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    json.loads(ran.stdout)


@pytest.mark.parametrize(
    "shape",
    ["Llama-3-8B", *(pytest.param(name, marks=pytest.mark.long) for name in ("SmolLM2-135M", "Phi-2", "Gemma-2-9B"))],
)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (the extra gpu)")
def test_no_kernel_spills(shape: str, tmp_path: Path) -> None:
    """Compiled for two architectures, without a GPU."""
    dtypes = ["bfloat16"] if shape == "Llama-3-8B" else ["bfloat16", "float32"]
    ran = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_kernels", "--shapes", shape, "--dtypes", *dtypes],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for name in (
        "_attend_parts",
        "_merge_parts_onto",
        "_rotate_and_append",
        "_gather",
        "_multiply",
        "_add_rms_norm",
        "_gated_silu",
        "_expert_wide",
        "_expert_narrow",
        "_column_sums",
    ):
        assert f"`{name}`" in ran.stdout, ran.stdout
    assert ran.stdout.count("product of 40 rows, float8: `_multiply`") == len(dtypes)
    of_experts = [line for line in ran.stdout.splitlines() if "`_expert_" in line]
    assert len(of_experts) == 2 * 6 * len(dtypes)
    assert all(line.endswith("| 16 |") for line in of_experts), "weights are read in narrow loads"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A module of a kernel that answers 5, and counts its trials."""
    module = SimpleNamespace(tried=[], fault=None, answer=lambda: 5)

    def trial(*kind: object) -> None:
        module.tried.append(kind)
        if module.fault is not None:
            raise module.fault

    module.trial = trial
    monkeypatch.setattr(gate, "_module", lambda name: module)
    refused.clear()
    yield module
    refused.clear()


A, B = ((torch.device("cpu"), name) for name in "ab")


def test_a_kernel_is_tried_once_for_each_kind(kernels: SimpleNamespace) -> None:
    own = Gate("answers")
    assert [own.run(lambda k: k.answer(), *A), own.run(lambda k: k.answer(), *A)] == [5, 5]
    assert own.passes(*B)
    assert kernels.tried == [A, B]


def test_a_kernel_that_cannot_be_built_is_done_without(
    kernels: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    own = Gate("answers")
    kernels.fault = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
    assert own.run(lambda k: k.answer(), *A) is None
    kernels.fault = None
    assert own.run(lambda k: k.answer(), *A) is None, "it is not tried again"
    assert "answers is not used, torch does its work: Failed to find C compiler" in caplog.text
    assert "(cpu, a)" in caplog.text
    assert own.passes(*B), "other kinds are"
    assert refused == {"answers": 1}


def test_a_launch_that_fails_later_is_torchs_work(kernels: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    own = Gate("answers")
    assert own.passes(*A)

    def fails(module: object) -> None:
        raise ValueError

    assert own.run(fails, *A) is None
    assert not own.passes(*A)
    assert "answers is not used, torch does its work: ValueError" in caplog.text


def test_a_device_without_memory_says_nothing_of_a_kernel(kernels: SimpleNamespace) -> None:
    own = Gate("answers")
    kernels.fault = torch.OutOfMemoryError("no memory")
    with pytest.raises(torch.OutOfMemoryError):
        own.passes(*A)
    kernels.fault = None
    assert own.passes(*A)


def test_what_has_no_memory_left_for_a_program_says_nothing_of_it(kernels: SimpleNamespace) -> None:
    own = Gate("answers")
    kernels.fault = RuntimeError("Triton Error [CUDA]: out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        own.passes(*A)
    kernels.fault = None
    assert own.passes(*A)
    assert not refused


def test_launches_are_on_the_tensors_device(kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device is the thread's."""
    current = [torch.device("cuda", 0)]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    other = torch.device("cuda", 1)
    assert Gate("answers").run(lambda module: current[-1], other, "a") == other
    assert Gate("answers").run(lambda module: current[-1], *A) == current[0]


def test_a_triton_that_does_not_fit_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(name: str) -> None:
        raise AttributeError(f"module 'triton' has no attribute 'knobs' ({name})")

    monkeypatch.setattr(importlib, "import_module", fails)
    doors.kernel_modules().cache_clear()
    refused.clear()
    try:
        assert [Gate("triton_attention").passes(*A) for _ in range(2)] == [False, False]
        assert refused == {"triton_attention": 1}
    finally:
        doors.kernel_modules().cache_clear()
        refused.clear()
    assert caplog.text.count("triton_attention is not used, torch does its work: module 'triton' has no attribute") == 1


def test_without_triton_nothing_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    doors.kernel_modules().cache_clear()
    try:
        assert not Gate("triton_attention").passes(*A)
    finally:
        doors.kernel_modules().cache_clear()
    assert not caplog.records
    assert not refused


def test_answers_that_differ_are_refused() -> None:
    ones = torch.ones(3)
    agree("x", ones + 1e-3, ones, 1e-2)
    agree("x", torch.tensor([-torch.inf, 100.5]), torch.tensor([-torch.inf, 100.0]), 1e-2)
    for other in (ones + 0.1, ones * torch.nan, ones * torch.inf):
        with pytest.raises(ArithmeticError, match="x differs from torch by"):
            agree("x", other, ones, 1e-2)


def test_heads_that_the_kernel_takes() -> None:
    assert suited(torch.bfloat16, 256, 32)
    assert suited(torch.float32, 128, 16)
    for dtype, head_dim, group in (
        (torch.float32, 136, 1), (torch.bfloat16, 20, 1), (torch.float32, 64, 17), (torch.float64, 64, 1),
    ):  # fmt: skip
        assert not suited(dtype, head_dim, group)
    assert not possible(torch.device("cpu"), torch.float32, 64, 4, 4, 0.0)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (the extra gpu)")
def test_triton_products_take_16_dimensions_at_least() -> None:
    """Triton before 3.8 compiles none of fewer; its interpreter takes any."""
    from afterglow.kernels.triton_attention import lanes

    assert [lanes(head_dim) for head_dim in (8, 16, 80, 128)] == [16, 16, 128, 128]
