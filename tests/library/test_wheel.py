"""The built wheel, installed where there is no compiler, has the kernels and answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="builds kernels for Linux"),
]


def run(
    *command: str | Path, env: dict[str, str] | None = None, said: str | None = None
) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=env, input=said or "")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree without what earlier builds have left in it."""
    copy = tmp_path_factory.mktemp("sources") / "tree"
    left_out = shutil.ignore_patterns(
        ".git", ".venv", ".peers", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, copy, ignore=left_out)
    return copy


def build(sources: Path, kernels: str) -> Path:
    env = {**os.environ, "AFTERGLOW_KERNELS": kernels}
    folder = sources / "dist" / kernels
    shutil.rmtree(sources / "build", ignore_errors=True)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, sources, env=env)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    return build(sources, "required")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The binaries of a clean environment with the wheel, and process variables under which no compiler is found."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    binaries = folder / "venv" / "bin"
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "AFTERGLOW"))
    }
    env |= {
        "PATH": str(binaries),
        "CC": "/bin/false",
        "CXX": "/bin/false",
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_CONFIG_HOME": str(folder / "config"),
    }
    assert shutil.which("gcc", path=env["PATH"]) is None
    pip = (sys.executable, "-m", "pip", "--python", binaries / "python", "install", "--quiet", "--only-binary", ":all:")
    run(*pip, "-c", ROOT / "constraints.txt", wheel, env={**os.environ, "CC": "/bin/false", "PATH": env["PATH"]})
    return binaries, env


def test_a_wheel_with_kernels_is_for_every_python_of_a_platform(wheel: Path) -> None:
    assert wheel.name.startswith("afterglow_llm-")
    assert "-py3-none-linux_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "afterglow/kernels/_native.so" in names
    assert "afterglow/py.typed" in names
    assert not [name for name in names if ".cpython-" in name]


def test_a_wheel_without_kernels_is_for_any_machine(sources: Path) -> None:
    wheel = build(sources, "none")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_the_installed_wheel_has_its_kernels_and_says_so(installed: tuple[Path, dict[str, str]]) -> None:
    binaries, env = installed
    program = (
        "import logging; logging.basicConfig(level='INFO'); from afterglow.kernels.built import native; print(native())"
    )
    ran = run(binaries / "python", "-c", program, env=env)
    assert "vectors of " in ran.stdout
    assert ran.stderr.count("kernels on CPU: compiled") == 1


def test_without_the_library_one_warning_says_so(installed: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    binaries, env = installed
    (package,) = binaries.parent.glob("lib/python*/site-packages/afterglow")
    shutil.copytree(package, tmp_path / "afterglow", ignore=shutil.ignore_patterns("*.so"))
    ran = run(
        binaries / "afterglow",
        "generate",
        "afterglow-small",
        "-p",
        "The boat",
        "--max-tokens",
        "2",
        env={**env, "PYTHONPATH": str(tmp_path)},
    )
    assert ran.stderr.count("kernels on CPU: torch's operators only") == 1


def test_the_installed_commands_answer(installed: tuple[Path, dict[str, str]]) -> None:
    binaries, env = installed
    fact, question = "My favorite color is teal.", "What is my favorite color?"
    assert (
        "teal" in run(binaries / "afterglow", "chat", "afterglow-small", env=env, said=f"{fact}\n{question}\n").stdout
    )
    assert run(
        binaries / "afterglow", "generate", "afterglow-small", "--prompt", "The boat is", "--max-tokens", "4", env=env
    ).stdout.strip()
    version = run(
        binaries / "python", "-c", "import importlib.metadata as m; print(m.version('afterglow-llm'))", env=env
    )
    assert run(binaries / "afterglow", "--version", env=env).stdout.split() == ["afterglow", version.stdout.strip()]


def test_help_imports_no_torch(installed: tuple[Path, dict[str, str]]) -> None:
    binaries, env = installed
    ran = run(binaries / "python", "-X", "importtime", "-m", "afterglow.cli", "--help", env=env)
    assert "serve" in ran.stdout
    assert "afterglow.cli.commands" in ran.stderr
    assert not [
        line
        for line in ran.stderr.splitlines()
        if line.split("|")[-1].strip() in ("torch", "transformers", "starlette")
    ]
