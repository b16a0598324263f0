"""Every command in the documents exists and takes the options that it is given; the cheap ones are run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from afterglow.cli.commands import app
from tests.docs.code_blocks import DOCUMENTS, ROOT, code_blocks

CHEAP = ("--version", "--help", "generate", "embed", "simulate", "plan")
HISTORY = ("docs/log.md", "CHANGELOG.md")  # show commands as they were then
ROOT_COMMAND: Any = typer.main.get_command(app)


def lines(code: str) -> list[str]:
    """The commands of a shell block: without comments, prompts and continued lines."""
    joined = code.replace("\\\n", " ")
    found = [line.partition(" # ")[0].removeprefix("$ ").strip() for line in joined.splitlines()]
    return [line for line in found if line and not line.startswith("#")]


def in_documents() -> list[tuple[str, str]]:
    """All command lines: (where, what)."""
    found = [(block.name, line) for block in code_blocks("sh") for line in lines(block.code)]
    for path in DOCUMENTS:
        if str(path.relative_to(ROOT)) not in HISTORY:
            text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
            spans = re.findall(r"(?<!`)`((?:afterglow|make) [^`]+)`(?!`)", text)
            found += [(str(path.relative_to(ROOT)), " ".join(span.split())) for span in spans]
    return [item for item in dict.fromkeys(found) if item[0].partition(":")[0] not in HISTORY]


COMMANDS = in_documents()
OURS = [(where, line) for where, line in COMMANDS if re.match(r"(\S*/)?afterglow(\s|$)", line)]
RUN = [(where, line) for where, line in OURS if not where.endswith(".md") and line.split()[1] in CHEAP]


def resolve(args: list[str]) -> tuple[Any, list[str]]:
    """Follow subcommands to the last one; what remains are its arguments."""
    command = ROOT_COMMAND
    while hasattr(command, "commands") and args and not args[0].startswith("-"):
        assert args[0] in command.commands, f"{command.name} has no command {args[0]!r}"
        command, args = command.commands[args[0]], args[1:]
    return command, args


@pytest.mark.parametrize(("where", "line"), OURS, ids=[f"{where}: {line}" for where, line in OURS])
def test_a_command_takes_its_options(where: str, line: str) -> None:
    args = shlex.split(line.partition(" | ")[0].partition(" > ")[0].removesuffix(" &"))[1:]
    for alternatives in [part for part in args if re.fullmatch(r"\w+(\|\w+)+", part)]:  # `cache ls|pin|rm`
        for choice in alternatives.split("|"):
            resolve([choice if part == alternatives else part for part in args])
        return
    command, rest = resolve(args)
    takes = [command]
    if command.name == "cluster":  # it hands all others on to its servers
        takes.append(ROOT_COMMAND.commands["serve"])
    known = {
        name for each in takes for parameter in each.params for name in (*parameter.opts, *parameter.secondary_opts)
    }
    known |= {"--help", "-h"}
    for part in rest:
        if part.startswith("-") and part != "-" and not re.fullmatch(r"-\d.*", part):
            assert part.partition("=")[0] in known, f"{command.name} has no option {part}"


@pytest.mark.parametrize(("where", "line"), RUN, ids=[f"{where}: {line}" for where, line in RUN])
def test_a_cheap_command_runs(where: str, line: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "afterglow.cli", *shlex.split(line)[1:]],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    used = {(where, word) for where, line in COMMANDS if line.startswith("make ") for word in line.split()[1:]}
    assert used
    assert not [(where, word) for where, word in used if "=" not in word and word not in targets]


def test_shell_blocks_say_so() -> None:
    """A block of commands without a language would escape these tests."""
    for block in code_blocks(""):
        if "<!-- generated: command" not in block.path.read_text("utf-8").partition(block.code)[0][-200:]:
            assert not re.search(r"^(\$ )?(\S*/)?(afterglow|make|pip|curl|uv) ", block.code, re.MULTILINE), block.name
