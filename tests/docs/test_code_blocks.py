"""Every Python program in the documents runs, and prints what the document says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.code_blocks import CodeBlock, code_blocks

PROGRAMS = code_blocks("python")


@pytest.mark.parametrize("block", PROGRAMS, ids=[block.name for block in PROGRAMS])
def test_a_program_runs_and_prints_what_it_says(
    block: CodeBlock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    exec(compile("\n" * (block.line - 1) + block.code, str(block.path), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()
    assert block.printed, "a program shows what it prints"
    assert len(printed) == len(block.printed)
    for line, expected in zip(printed, block.printed, strict=True):
        assert re.fullmatch(re.escape(expected).replace(r"\.\.\.", ".*"), line), f"{line!r} is not {expected!r}"
