"""Help, options, mistakes and exit codes, in real processes where they matter."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from afterglow.cli.commands import app
from afterglow.cli.parameters import command
from afterglow.config import CacheConfig, EngineConfig, option
from afterglow.errors import ModelError
from afterglow.library.locate import find_model
from afterglow.library.threads import physical_cores
from afterglow.server.server_config import ServerConfig
from tests.cli.kit import SMALL, afterglow, flat, inside, needs_model
from tests.text import toys


@pytest.mark.parametrize(
    "command_line", [["--help"], ["serve", "--help"], ["simulate", "--help"], ["cache", "ls", "-h"]]
)
def test_help_imports_little(command_line: list[str]) -> None:
    """Its time is that of its imports: no library but those of the command line, and few files of our own."""
    code = f"""
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
sys.argv = ["afterglow", *{command_line}]
from afterglow.cli import main
main()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    modules = ran.stderr.split()
    heavy = {"torch", "starlette", "numpy", "tokenizers", "httpx", "yaml", "safetensors", "cffi", "asyncio"}
    heavy.add("matplotlib")
    assert not heavy & set(modules)
    assert len([name for name in modules if name.startswith("afterglow")]) <= 25
    assert len(modules) < 550
    assert "Usage: afterglow" in ran.stdout


COMMANDS = (
    "serve",
    "generate",
    "chat",
    "embed",
    "bench",
    "simulate",
    "plan",
    *(f"cache {name}" for name in ("ls", "stats", "pin", "unpin", "rm", "register", "unregister", "check", "clear")),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_sentences_with_defaults(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80


def test_every_setting_is_a_flag() -> None:
    text = flat(CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output)
    for config in (ServerConfig, EngineConfig, CacheConfig):
        for field in fields(config):
            if field.name != "cache":
                assert "--" + field.name.replace("_", "-") in text
                assert field.metadata["help"].endswith(".")
                for bracketed in re.findall(r"[^\s(]*\[[^]]*\]", field.metadata["help"]):
                    assert bracketed in text
    assert "afterglow-llm[tools]" in text
    assert "[default: 16M]" in text
    assert "One of auto, float32, bfloat16, float16." in text


@dataclass(frozen=True)
class Word:
    word: str = option("x", "A word.")


def test_flags_become_settings() -> None:
    seen: dict[str, Any] = {}
    small = typer.Typer()
    small.callback()(lambda: None)

    @command(small, "try")
    def try_it(server: ServerConfig, engine: EngineConfig, word: Word) -> int:
        seen.update(server=server, engine=engine, word=word.word)
        return 3

    args = [
        "try",
        "--host-cache",
        "1.5G",
        "--no-reuse",
        "--api-key",
        "a",
        "--api-key",
        "b",
        "--threads",
        "3",
        "--word",
        "y",
    ]
    result = CliRunner().invoke(small, args)
    assert result.exit_code == 3, result.output
    assert seen["server"] == ServerConfig(api_key=("a", "b"))
    assert seen["engine"] == EngineConfig(threads=3, cache=CacheConfig(host_cache=3 * 2**29, reuse=False))
    assert seen["word"] == "y"


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--version"], 0, r"^afterglow \d"),
        (["serve", "/no/such/model"], 2, "there is no model '/no/such/model'"),
        (["serve", "--bogus"], 2, "no such option: --bogus"),
        (["serve", "--model", "x"], 2, "no such option: --model; give its value alone: afterglow serve MODEL"),
        (["serve", "--port", "70000"], 2, "--port must be between 0 and 65535, got 70000"),
        (
            ["serve", "--port", "many"],
            2,
            "invalid value for '--port': 'many' is not a whole number; write it in digits",
        ),
        (["generate", "--max-tokens", "1e12"], 2, "invalid value for '--max-tokens': '1e12' is not a whole number"),
        (
            ["serve", "--grace", "x"],
            2,
            r"invalid value for '--grace': 'x' is not a number \(see afterglow serve --help",
        ),
        (["serve", "a", "b"], 2, "unexpected extra argument"),
        (["cache", "pin"], 2, "missing argument 'NAME'"),
        (["serve", "--host-cache", "3X"], 2, "'3X' is not a size"),
        (["serve", "--dtype", "int3"], 2, ": 'int3' is not one of 'auto', 'float32'"),
        (["serve", "--max-batch", "0"], 2, "--max-batch must lie between 1 and 4096, got 0"),
        (
            ["generate", "The cat"],
            2,
            "there is no model 'The cat'.*; to go on with this text: afterglow generate --prompt 'The cat'",
        ),
        (["generate", "--prompt", "a", "--file", "b"], 2, "give --prompt or --file, not both"),
        (["generate", "--file", "/no/such/file"], 2, "cannot read /no/such/file"),
        (["chat", "--url", "http://127.0.0.1:9"], 2, "no server answers at http://127.0.0.1:9"),
        (
            ["chat", "--url", "http://127.0.0.1:9", "--host-cache", "8G"],
            2,
            "--host-cache does nothing beside --url: a server has options of its own",
        ),
        (["chat", "--api-key", "k"], 2, "--api-key does nothing without --url: it is for a server"),
        (["serve", "--importance-renew", "0"], 2, "--importance-renew does nothing without --importance"),
        (
            ["generate", "-p", "a", "--reorder-interval", "60"],
            2,
            "--reorder-interval does nothing without --importance",
        ),
        (["embed", "a", "--threshold", "0.9"], 2, "--threshold does nothing without --memo"),
        (["serve", "--memo-mode", "on"], 2, "--memo-mode does nothing without --memo"),
        (["bench", "nothing"], 2, "no benchmark 'nothing'"),
        (
            ["bench", "--seed", "3", "disk"],
            2,
            "give the name of a benchmark before its options: afterglow bench NAME --seed",
        ),
        (["cache", "ls", "--cache-dir", "/no/such/folder"], 2, "there is no cache directory"),
        (["frobnicate"], 2, "no such command 'frobnicate'"),
    ],
)
def test_mistakes_end_with_one_line_and_a_code(args: list[str], code: int, says: str) -> None:
    result = (inside if args[0] == "cache" else afterglow)(*args)
    assert result.returncode == code
    assert re.search(says, flat(result.stdout + result.stderr).strip()), result.stderr
    assert "Traceback" not in result.stderr
    assert code == 0 or (result.stderr.count("\n") == 1 and result.stderr.startswith("afterglow: error: "))


@pytest.mark.parametrize("args", [(), ("cache",)])
def test_without_arguments_help_is_shown_once(args: tuple[str, ...]) -> None:
    result = afterglow(*args, COLUMNS="80")
    assert (result.stdout + result.stderr).count("Usage:") == 1
    assert "error" not in result.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_input_that_is_no_text(command: str) -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "afterglow.cli",
            command,
            "afterglow-small",
            "--device-cache",
            "64M",
            "--disk-cache",
            "0",
        ],
        input=b"a\xff\xfeb\n",
        capture_output=True,
        timeout=120,
        check=False,
    )
    if command == "chat" and b"bundled" in result.stderr:
        pytest.skip("no bundled model in this checkout")
    assert result.returncode == 2
    assert result.stderr.startswith(b"afterglow: error: standard input is not UTF-8 text: it has a byte 0xff")
    assert result.stderr.count(b"\n") == 1


MAIN = [sys.executable, "-m", "afterglow.cli"]


def test_a_reader_that_has_gone_and_a_full_disk_end_a_command_quietly(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        result = subprocess.run([*MAIN, "bench"], stdout=gone, stderr=subprocess.PIPE, timeout=120, env=env)
    assert (result.returncode, result.stderr) == (141, b"")
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            result = subprocess.run([*MAIN, "bench"], stdout=full, stderr=subprocess.PIPE, timeout=120, env=env)
        said = b"afterglow: error: there is no space left where standard output, or a file, is written\n"
        assert (result.returncode, result.stderr) == (2, said)


def test_streams_that_are_closed_or_know_few_characters(tmp_path: Path) -> None:
    closed = subprocess.run(
        ["sh", "-c", f"{' '.join(MAIN)} memo add /no/folder <&- 2>&-"], capture_output=True, timeout=120
    )
    assert (closed.returncode, closed.stdout) == (2, b"")
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    result = subprocess.run([*MAIN, "serve", "--help"], capture_output=True, timeout=120, env=env)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.parametrize("name", ["multiturn", "disk", "engine", "overhead"])
def test_benchmarks_show_their_own_options(name: str) -> None:
    """With a text for each option."""
    for flag in ("--help", "-h"):
        result = inside("bench", name, flag)
        assert result.returncode == 0
        assert f"usage: afterglow bench {name}" in result.stdout
    own = result.stdout[result.stdout.index("options:") :]
    listed = re.findall(r"^  (--\w[\w-]*)(.*(?:\n {10,}.*)*)", own, re.MULTILINE)
    assert {"--quick", "--json", "--seed"} <= {option for option, _ in listed}
    assert all(re.search(r"( {2,}|\n +)\w{3,}", text) for _, text in listed), listed


def test_an_interrupt_during_the_first_imports_is_quiet() -> None:
    code = """
import sys
class Interrupt:
    def find_spec(self, name, *rest):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from afterglow.cli import main
main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (130, "")


def test_a_model_without_tokenizer_and_a_port_in_use(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = afterglow("serve", str(tmp_path), "--port", "0")
    assert result.returncode == 2
    assert result.stderr.startswith("afterglow: error: ")
    assert "has no tokenizer.json" in result.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        toys.byte_level(tmp_path)
        result = afterglow("serve", str(tmp_path), "--port", str(taken.getsockname()[1]))
    assert result.returncode == 2
    assert "is in use" in result.stderr
    assert result.stderr.count("\n") == 1


def test_models_are_found_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--small" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--small" / "refs").mkdir()
    (tmp_path / "models--org--small" / "refs" / "main").write_text("abc")
    assert find_model("org/small") == snapshot
    for name in ("org/other", "a b/c"):
        with pytest.raises(ModelError, match=f"there is no model '{name}'"):
            find_model(name)
    with pytest.raises(ModelError, match=r"it has no config\.json"):
        find_model(str(tmp_path))


def test_physical_cores() -> None:
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)


@needs_model
def test_generate_reads_a_pipe_and_repeats_itself(tmp_path: Path) -> None:
    args = ("generate", "afterglow-small", "--max-tokens", "8", "--cache-dir", str(tmp_path), *SMALL)
    first = afterglow(*args, input="My name is\n")
    second = afterglow(*args, "--prompt", "My name is")
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout != ""
