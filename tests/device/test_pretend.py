"""The engine on a pretend CUDA device: the same answers as on the CPU, and nothing that a device would refuse."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from afterglow.engine.hardware import choose_device
from afterglow.errors import ConfigError
from afterglow.kernels.built import native
from tests import doors
from tests.device import pretend

KERNELS = pytest.mark.parametrize(
    "kernels",
    [
        False,
        pytest.param(
            True, id="triton", marks=pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton")
        ),
    ],
)


def play(scene: str, device: str, folder: Path) -> tuple[Any, str]:
    """A scene's answer, and its log."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.device.play", scene, device, str(folder)],
        capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout), ran.stderr


def test_a_torch_that_it_has_not_run_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.1+cpu")
    with pytest.raises(RuntimeError, match=r"known to work with torch 2\.13, and this is 2\.14\.1\+cpu: install what "):
        pretend.install()


def test_devices_that_are_mixed_are_refused(tmp_path: Path) -> None:
    found, _ = play("mixed", "cuda", tmp_path)
    assert found == ["add", "mm", "index", "index_put_", "cat", "where", "addmm_"]


@pytest.mark.parametrize("scene", ["reuse", "importance"])
def test_answers_are_those_of_the_cpu(scene: str, tmp_path: Path) -> None:
    theirs, _ = play(scene, "cpu", tmp_path / "cpu")
    ours, log = play(scene, "cuda", tmp_path / "cuda")
    assert [each[:2] for each in ours] == [each[:2] for each in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a[2] == pytest.approx(b[2], abs=1e-4)
    assert "Traceback" not in log
    assert max(each[1] for each in ours) >= 200, "nothing was reused"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (the extra gpu)")
def test_answers_of_tritons_kernels_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding, guesses and shared rows through the engine, by kernels in Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    theirs, _ = play("kernels", "cpu", tmp_path / "cpu")
    ours, log = play("kernels", "cuda", tmp_path / "cuda")
    assert [each[:2] for each in ours[:-1]] == [each[:2] for each in theirs[:-1]]
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        assert a[2] == pytest.approx(b[2], abs=1e-4)
    assert (theirs[-1], ours[-1]) == (False, True)
    assert "is not used" not in log


@KERNELS
def test_rounded_weights_are_multiplied_as_what_they_stand_for(
    kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a model of the widened weights on the CPU."""
    theirs, _ = play("rounded", "cpu", tmp_path / "cpu")
    if kernels:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    ours, log = play("rounded", "cuda", tmp_path / "cuda")
    assert ours[2::3] == [f"{kind} alone" for kind in ("int8", "int4", "float8") for _ in range(2)]
    for which in (0, 1):
        for a, b in zip(ours[which::3], theirs[which::3], strict=True):
            assert a == pytest.approx(b, abs=1e-4)
    assert not kernels or "is not used" not in log


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (the extra gpu)")
def test_triton_texts_are_embedded_on_the_models_device_whatever_the_threads_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, _ = play("embedding", "cpu", tmp_path / "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ours, log = play("embedding", "cuda", tmp_path / "cuda")
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    assert ours[1] > 0
    assert "is not used" not in log


@KERNELS
def test_rows_in_8_bits_come_back_as_the_cpus(kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch for a request and layer, and one to try the kernel."""
    theirs, _ = play("stored", "cpu", tmp_path / "cpu")
    if kernels:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    ours, log = play("stored", "cuda", tmp_path / "cuda")
    assert [each[:2] for each in ours[:-1]] == [each[:2] for each in theirs[:-1]]
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        assert a[2] == pytest.approx(b[2], abs=1e-3)  # a sum in another order may round to the next of 127 steps
    assert (theirs[-1], ours[-1]) == (0, 2 * 2 + 1 if kernels else 0)
    assert not kernels or "is not used" not in log


def test_rows_of_a_request_that_waits_come_before_its_turn(tmp_path: Path) -> None:
    """Two requests behind another one: in the steps that admit them no layer comes from host memory; with a buffer of one layer, the
    second one. And the same with one of them cancelled, which is read ahead in vain."""
    theirs, _ = play("read_ahead", "cpu", tmp_path / "cpu")
    ours, log = play("read_ahead", "cuda", tmp_path / "cuda")
    assert [each for each in ours["answers"] if isinstance(each, list)] == [
        each for each in theirs["answers"] if isinstance(each, list)
    ]
    assert ours["races"] == []
    assert "Traceback" not in log
    row = 2 * 2 * 16 * 4  # bytes of keys and values in one layer
    first, second = 70 + 130, 78 + 138  # rows of both, then with what the replies' prompts have left
    ahead, read = (found[5:7] for found in (ours["answers"], theirs["answers"]))
    assert ahead == [2 * row * (first + second), 0]
    assert read == [0, 2 * row * (first + 138)]
    assert 2 * ours["answers"][-1] == theirs["answers"][-1] - read[1]


def test_so_many_layers_come_before_its_turn_as_the_devices_rate_asks_for(tmp_path: Path) -> None:
    """Nine rows behind 70, and behind 130, take 0.18 s to compute in each of two layers: longer than a layer's rows take at 1 ms each, and
    less than at 10 ms."""
    theirs, _ = play("rated", "cpu", tmp_path / "cpu")
    ours, log = play("rated", "cuda", tmp_path / "cuda")
    assert [each for each in ours if isinstance(each, list)] == [each for each in theirs if isinstance(each, list)]
    assert "Traceback" not in log
    layer = 2 * 2 * 16 * 4 * (70 + 130)
    assert [each for each in ours if isinstance(each, int)] == [layer, layer, 2 * layer, 0]


def test_auto_takes_a_device_that_answers_as_the_cpu_does(tmp_path: Path) -> None:
    found, log = play("choice", "cuda", tmp_path)
    assert found == ["cuda", "cpu"]
    assert "has passed a self-test and is used; its speed has not been measured" in log
    assert "gave other answers than the CPU, so the CPU is used" in log


def test_what_is_compiled_for_the_cpu_cannot_read_the_device(tmp_path: Path) -> None:
    if native() is None:
        pytest.skip("there are no compiled kernels")
    assert play("compiled", "cpu", tmp_path)[0] is True
    with pytest.raises(AssertionError):
        play("compiled", "cuda", tmp_path)


def test_host_memory_is_locked_exactly_and_let_go(tmp_path: Path) -> None:
    locked, after, refusal, computed = play("memory", "cuda", tmp_path)[0]
    assert locked == [3 * 2**20 + 4096]
    assert after == []
    assert "--host-cache 2.0 MiB cannot be locked" in refusal
    assert "ulimit -l" in refusal
    assert computed == [2, 2], "CUDA's error is raised once"


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:0"])
def test_names_that_are_no_device(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--device must be cpu, cuda, cuda:N or auto, got '{name}'"):
        choose_device(name)


def test_a_device_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert choose_device("cuda") == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="--device cuda:2 was asked for, but there are 2 CUDA devices"):
        choose_device("cuda:2")


def test_a_triton_that_cannot_build_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Module:
        @staticmethod
        def merge_onto(*args: object) -> None:
            raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setitem(sys.modules, "afterglow.kernels.triton_merge", Module)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, device=None, **kwargs: zeros(*args, **kwargs))
    doors.fused_merge().cache_clear()
    try:
        assert doors.fused_merge()(torch.device("cpu")) is None
    finally:
        doors.fused_merge().cache_clear()
    assert "Failed to find C compiler" in caplog.text
