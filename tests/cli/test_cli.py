"""The command line as a user meets it: real processes for exit codes and signals, the rest in this one."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from typer.testing import CliRunner

from afterglow.cli import main, options
from afterglow.cli.chat import ABOUT_BUNDLED, BUNDLED_LONGEST, Messages, RemoteSpeaker, converse
from afterglow.cli.commands import app
from afterglow.cli.environment import find_model, physical_cores
from afterglow.config import CacheConfig, EngineConfig
from afterglow.errors import ModelError
from afterglow.server.presence import address_of, announce
from afterglow.server.settings import ServerConfig
from afterglow.store.layout import KVLayout
from afterglow.store.namespace import Namespace
from tests.server.conftest import REPLY, Running, running, wait_for
from tests.text import toys

BUNDLED = Path(__file__).parents[2] / "src/afterglow/assets/model"
SMALL = ("--device-cache", "64M", "--host-cache", "64M", "--disk-cache", "64M", "--threads", "1")


# A server that ends with this process, however it ends: then nobody holds the other end of its standard input.
TIED = """
import os, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
from afterglow.cli import main
main()
"""


def afterglow(*args: str, input: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "afterglow.cli", *args]
    return subprocess.run(
        command,
        input=input,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
        check=False,
    )


def inside(*args: str) -> subprocess.CompletedProcess[str]:
    """The same without a process of its own: quicker where only files are looked at."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with mock.patch("sys.argv", ["afterglow", *args]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(args, int(str(code or 0)), out.getvalue(), err.getvalue())


def flat(text: str) -> str:
    """Help without its frames and line breaks."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text))


def test_help_needs_no_heavy_imports() -> None:
    heavy = ("torch", "fastapi", "numpy", "tokenizers")
    code = f"import sys, afterglow.cli.commands; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


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
        for name in options._flag_names(config):
            assert "--" + name.replace("_", "-") in text
            assert config.__dataclass_fields__[name].metadata["help"].endswith(".")
    assert "[default: 16M]" in text
    assert "One of auto, float32, bfloat16, float16." in text


def test_flags_become_settings() -> None:
    seen: dict[str, Any] = {}

    @options.with_configs(ServerConfig, EngineConfig, CacheConfig)
    def command(server: ServerConfig, engine: EngineConfig, word: str = "x") -> None:
        seen.update(server=server, engine=engine, word=word)

    import typer

    small = typer.Typer()
    small.command()(command)
    args = [
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
    assert result.exit_code == 0, result.output
    assert seen["server"] == ServerConfig(api_key=("a", "b"))
    assert seen["engine"] == EngineConfig(threads=3, cache=CacheConfig(host_cache=3 * 2**29, reuse=False))
    assert seen["word"] == "y"


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--version"], 0, r"^afterglow \d"),
        (["serve", "/no/such/model"], 2, "there is no model '/no/such/model'"),
        (["serve", "--bogus"], 2, "no such option: --bogus"),
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
        (["bench", "nothing"], 2, "no benchmark 'nothing'"),
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
        [sys.executable, "-m", "afterglow.cli", command, "--device-cache", "64M", "--disk-cache", "0"],
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


@pytest.mark.parametrize("name", ["multiturn", "disk", "engine", "overhead"])
def test_benchmarks_show_their_own_options(name: str) -> None:
    """With a text for each of them."""
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
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--small" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--small" / "refs").mkdir()
    (tmp_path / "models--org--small" / "refs" / "main").write_text("abc\n")
    assert find_model("org/small") == snapshot
    with pytest.raises(ModelError, match="there is no model 'org/other'"):
        find_model("org/other")
    with pytest.raises(ModelError, match=r"it has no config\.json"):
        find_model(str(tmp_path))


def test_physical_cores() -> None:
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)


# ------------------------------------------------------------------------------------------------- chat


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(toys.byte_level(tmp_path_factory.mktemp("model"))) as server:
        yield server.url


def test_chat_over_pipes(url: str) -> None:
    result = afterglow("chat", "--url", url, "--system", "Be brief.", input="hello\n\n/reset\nagain\nmore\n/quit\nno\n")
    assert result.returncode == 0
    assert result.stdout.splitlines() == [REPLY] * 3
    notes = result.stderr.splitlines()
    assert len(notes) == 3
    assert re.fullmatch(r"\[\d+ prompt tokens, 0 cached, first token after \d+ ms\]", notes[0])
    assert re.search(r"\d+ cached \(host \d+\)", notes[2])


class Canned:
    note = "note"

    def __init__(self, pieces: list[str | BaseException]) -> None:
        self.pieces = pieces
        self.asked: list[Messages] = []

    def reply(self, messages: Messages) -> Iterator[str]:
        self.asked.append([dict(m) for m in messages])
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield piece


def test_commands_and_interruptions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/system Be kind.\nhi again\n/help\n/nonsense\n"))
    speaker = Canned(["par", KeyboardInterrupt()])
    assert converse(speaker, None) == 0
    assert speaker.asked == [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi again"}],
    ]
    out = capsys.readouterr().out
    assert out.count("par …") == 2
    assert "/reset" in out
    assert "there is no command /nonsense" in out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bundled_model_says_what_it_can_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(""))
    monkeypatch.setattr("builtins.input", lambda prompt: (_ for _ in ()).throw(EOFError))
    assert converse(Canned([]), None, ABOUT_BUNDLED) == 0
    assert capsys.readouterr().out.startswith("This is the small model that ships with Afterglow.")
    assert converse(Canned([]), None) == 0
    assert capsys.readouterr().out.startswith("Type a message")


@pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")
def test_the_first_conversation_works_and_ends() -> None:
    """The prompts that are proposed are answered; a question that the model cannot answer ends all the same, and says so."""
    told, asked = (line.strip() for line in ABOUT_BUNDLED.splitlines()[1:3])
    talk = f"{told}\n{asked}\n/reset\nMy name is Ada.\nWhat is my name?\n"
    result = afterglow("chat", *SMALL, input=talk)
    replies = result.stdout.splitlines()
    assert result.returncode == 0
    assert "teal" in replies[1]
    assert len(replies[3]) < 1000
    assert result.stderr.splitlines()[3].endswith(f"cut off after {BUNDLED_LONGEST} tokens (--max-tokens)]")
    assert "cut off" not in result.stderr.splitlines()[1]


def test_a_server_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without asking for fewer tokens, which a server with a short context would refuse."""
    monkeypatch.setattr("afterglow.cli.chat.LONGEST", 5)
    with running(toys.byte_level(tmp_path)) as server:
        speaker = RemoteSpeaker(server.url, None, None, None, {"temperature": 0.0})
        assert 0 < len("".join(speaker.reply([{"role": "user", "content": "hi"}]))) < len(REPLY)
        speaker._client.close()
        assert speaker.note.endswith("cut off after 5 tokens (--max-tokens)")
        wait_for(lambda: server.engine.in_flight == 0)
        assert server.engine.requests[0].sampling.max_tokens > 5


def test_an_error_of_the_server_ends_a_pipe(url: str) -> None:
    result = afterglow("chat", "--url", url, input="the mill " * 600 + "\n")
    assert result.returncode == 2
    assert "maximum context length is 512 tokens" in result.stderr
    assert "Traceback" not in result.stderr


# ------------------------------------------------------------------------------------------ cache of a server


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = ServerConfig(port=0, grace=0.5, api_key=("one", "two"))
    with running(toys.byte_level(tmp_path_factory.mktemp("keyed")), config) as server:
        for key, name in (("one", "mine"), ("two", "theirs")):
            server.openai(key).chat.completions.create(
                model="fake-model", messages=[{"role": "user", "content": "hi"}], extra_body={"session_id": name}
            )
        yield server


def ask(server: Running, *args: str, key: str = "one") -> subprocess.CompletedProcess[str]:
    return inside("cache", *args, "--server", server.url, "--api-key", key)


def test_a_named_server_tells_each_key_its_own(keyed: Running) -> None:
    found = [json.loads(ask(keyed, "ls", "--json", key=key).stdout) for key in ("one", "two")]
    assert [[session["name"] for session in sessions] for sessions in found] == [["mine"], ["theirs"]]
    assert ask(keyed, "pin", "mine").returncode == 0
    assert "yes" in ask(keyed, "ls").stdout
    assert ask(keyed, "pin", "theirs").returncode == 1
    assert ask(keyed, "rm", "theirs").returncode == 1
    assert "sessions" in ask(keyed, "stats").stdout
    assert "engine" not in json.loads(ask(keyed, "stats", "--json").stdout)
    assert json.loads(ask(keyed, "rm", "--json", "theirs", key="two").stdout)[0]["deleted"] is True
    assert ask(keyed, "ls", key="two").stdout == "nothing is stored\n"
    salted = inside("cache", "ls", "--server", keyed.url, "--api-key", "one", "--cache-salt", "x", "--json")
    assert json.loads(salted.stdout) == []


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--server", "{url}", "--api-key", "wrong"), "wants another key; give it with --api-key"),
        (("--server", "{url}"), "wants another key"),
        (("--server", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
        (("--server", "http://[bad"), "no server answers at"),
        (("--server", "{url}/nonsense", "--api-key", "one"), "there is no /nonsense/v1/cache"),
    ],
)
@pytest.mark.parametrize("command", [("ls",), ("stats",), ("pin", "x"), ("rm", "x")])
def test_what_a_server_does_not_do_is_said(
    keyed: Running, command: tuple[str, ...], args: tuple[str, ...], says: str
) -> None:
    result = inside("cache", *command, *(arg.format(url=keyed.url) for arg in args))
    assert result.returncode in (1, 2)
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_holder_that_is_no_server_is_said(tmp_path: Path) -> None:
    layout = KVLayout(1, 1, 8, "F32")
    with Namespace.open(tmp_path, "m", "0" * 64, layout):
        listed = inside("cache", "ls", "m-", "--cache-dir", str(tmp_path))
        assert listed.returncode == 0
        assert f"process {os.getpid()}" in listed.stderr
        assert "does not say where it listens; try --server" in listed.stderr
        assert listed.stdout == "nothing is stored\n"
        assert inside("cache", "stats", "--cache-dir", str(tmp_path)).returncode == 0
        pinned = inside("cache", "pin", "x", "--cache-dir", str(tmp_path))
        assert pinned.returncode == 2
        assert "try --server" in pinned.stderr
        # A server that has died without giving its address back, and one that listens everywhere.
        announce(next(tmp_path.iterdir()), "http://0.0.0.0:9")
        assert address_of(next(tmp_path.iterdir())) == "http://127.0.0.1:9"
        listed = inside("cache", "ls", "m-", "--cache-dir", str(tmp_path))
        assert (listed.returncode, listed.stdout) == (0, "nothing is stored\n")
        assert "no server answers at http://127.0.0.1:9" in listed.stderr
        with Namespace.open(tmp_path, "n", "1" * 64, layout):
            several = inside("cache", "pin", "x", "--cache-dir", str(tmp_path))
            assert "several namespaces are held" in several.stderr
    assert address_of(next(tmp_path.iterdir())) is None


# ---------------------------------------------------------------------------------- with the bundled model

needs_model = pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")


@needs_model
def test_generate_reads_a_pipe_and_repeats_itself(tmp_path: Path) -> None:
    args = ("generate", "--max-tokens", "8", "--cache-dir", str(tmp_path), *SMALL)
    first = afterglow(*args, input="My name is\n")
    second = afterglow(*args, "--prompt", "My name is")
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout != ""


class Served:
    """`afterglow serve` on the bundled model, in a process."""

    def __init__(self, cache: Path, *args: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", TIED, "serve", "--port", str(self.port),
             "--cache-dir", str(cache), *SMALL, *args],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        self.tie, self.process.stdin = self.process.stdin, None  # `communicate` would close it
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{self.url}/health")
                return
            except httpx.TransportError:
                assert self.process.poll() is None, self.process.communicate()[1]
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def ask(self, **body: Any) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/v1/chat/completions", json={"temperature": 0, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def respond(self, **body: Any) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/v1/responses", json={"temperature": 0, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        """A test that fails shall not leave its server behind."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self.tie.close()

    def end(self, *signals: signal.Signals) -> tuple[int, str]:
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.7)  # two at once would be taken for one
        _, log = self.process.communicate(timeout=30)
        return self.process.returncode, log


@needs_model
def test_serve_restart_and_cache_commands(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "My name is Ada and I live near the old mill by the river."}]
    folder = ("--cache-dir", str(tmp_path))
    with Served(tmp_path) as server:
        first = server.ask(messages=messages, max_tokens=8)
        other = [{"role": "user", "content": "Ada's boat is blue, and it is kept in the harbour."}]
        second = server.ask(messages=other, max_tokens=8, session_id="ada/1")
        server.respond(input="My name is Ada.", max_output_tokens=4)
        held = inside("cache", "clear", "--yes", *folder)
        assert held.returncode == 2
        assert str(server.process.pid) in held.stderr
        assert inside("cache", "check", "--repair", *folder).returncode == 2
        card = httpx.get(f"{server.url}/v1/models").json()["data"][0]
        assert (card["id"], card["root"]) == ("afterglow-small", "afterglow-small")
        check_conversations(server, second["usage"]["prompt_tokens"], *folder)
        code, log = server.end(signal.SIGTERM)
    assert code == 0, log
    assert "Traceback" not in log
    assert re.search(r"POST /v1/chat/completions 200 prompt=\d+ cached=0 generated=\d+ ttft=\d+ms", log)

    listed = json.loads(inside("cache", "ls", "--json", *folder).stdout)
    assert len(listed) == 1
    assert listed[0]["namespace"].startswith("afterglow-small-")
    assert listed[0]["model"] == "afterglow-small"
    assert listed[0]["tokens"] >= first["usage"]["prompt_tokens"]
    assert (listed[0]["held_by"], listed[0]["listens_at"]) == (None, None)
    checked = inside("cache", "check", *folder)
    assert checked.returncode == 0
    assert "sound" in checked.stdout
    assert "tokens" in inside("cache", "stats", *folder).stdout
    extents = json.loads(inside("cache", "ls", listed[0]["namespace"], "--json", *folder).stdout)
    assert extents[0]["kind"] == "exact"
    nobody = inside("cache", "pin", "ada/1", *folder)
    assert nobody.returncode == 2
    assert "only where a server runs" in nobody.stderr

    with Served(tmp_path) as server:
        again = server.ask(messages=messages, max_tokens=8)
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
        tiers = again["usage"]["cached_tokens_details"]
        assert tiers["disk"] + tiers["host"] == first["usage"]["prompt_tokens"] - 1
        assert server.end(signal.SIGINT)[0] == 0

    extent = next(tmp_path.glob("*/extents/*/*.safetensors"))
    extent.write_bytes(extent.read_bytes()[:-4096] + b"x" * 4096)
    damaged = inside("cache", "check", "--json", "--cache-dir", str(tmp_path))
    assert damaged.returncode == 1
    assert json.loads(damaged.stdout)[0]["problems"][0]["kind"] == "damaged"
    assert inside("cache", "check", "--repair", "--cache-dir", str(tmp_path)).returncode == 0
    assert inside("cache", "check", "--cache-dir", str(tmp_path)).returncode == 0
    assert inside("cache", "clear", "--cache-dir", str(tmp_path)).returncode == 2
    assert inside("cache", "clear", "--yes", "--cache-dir", str(tmp_path)).returncode == 0
    assert json.loads(inside("cache", "ls", "--json", "--cache-dir", str(tmp_path)).stdout)[0]["extents"] == 0
    assert not list(tmp_path.glob("*/conversations*"))


def check_conversations(server: Served, prompt_tokens: int, *folder: str) -> None:
    """Through the server that the lock file names."""
    namespace = json.loads(inside("cache", "ls", "--json", *folder).stdout)[0]
    assert namespace["listens_at"] == server.url
    name = namespace["namespace"]
    deadline = time.monotonic() + 10  # what was just computed is still being saved
    while True:
        found = json.loads(inside("cache", "ls", name, "--json", *folder).stdout)
        if found and sum(found[0]["cached_tokens"].values()) >= prompt_tokens - 1:
            break
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    assert [session["name"] for session in found] == ["ada/1"]
    assert inside("cache", "pin", "ada/1", *folder).stdout == "ada/1: pinned\n"
    table = inside("cache", "ls", name, *folder).stdout.splitlines()
    assert re.match(r"ada/1 +\d+ .* yes$", table[1])
    assert inside("cache", "unpin", "ada/1", "--namespace", name, *folder).returncode == 0
    live = json.loads(inside("cache", "stats", "--json", *folder).stdout)[0]["server"]
    assert (live["sessions"]["count"], live["sessions"]["pinned"], live["responses"]["count"]) == (1, 0, 1)
    assert inside("cache", "ls", name, "--extents", *folder).stdout == "nothing is stored\n"  # it is all in memory
    gone = inside("cache", "rm", "ada/1", "nobody", *folder)
    assert (gone.returncode, gone.stdout) == (1, "ada/1: removed\n")
    assert "there is no conversation 'nobody'" in gone.stderr
    assert json.loads(inside("cache", "ls", name, "--json", *folder).stdout) == []


@needs_model
def test_the_second_signal_ends_at_once(tmp_path: Path) -> None:
    with (
        Served(tmp_path, "--grace", "60") as server,
        httpx.stream(
            "POST",
            f"{server.url}/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": "hi"}],
                "stream": True,
                "ignore_eos": True,
                "max_tokens": 2000,
            },
            timeout=30,
        ) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        began = time.monotonic()
        code, _ = server.end(signal.SIGINT, signal.SIGINT)
    assert code == 130
    assert time.monotonic() - began < 10


@needs_model
def test_a_server_of_these_tests_ends_with_them(tmp_path: Path) -> None:
    with Served(tmp_path) as server:
        server.tie.close()  # as the end of this process would
        assert server.process.wait(10) == 1


def test_an_empty_cache_says_so(tmp_path: Path) -> None:
    for command in ("ls", "check", "stats"):
        result = inside("cache", command, "--cache-dir", str(tmp_path))
        assert (result.returncode, result.stdout) == (0, "nothing is stored\n")
    assert json.loads(inside("cache", "check", "--json", "--cache-dir", str(tmp_path)).stdout) == []


@pytest.mark.parametrize("description", ['{"format": 999}', "{", "[]"])
def test_what_another_version_left_can_be_cleared(tmp_path: Path, description: str) -> None:
    layout = KVLayout(1, 1, 8, "F32")
    folder = ("--cache-dir", str(tmp_path))
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "mine").write_text("x")
    with Namespace.open(tmp_path, "m", "0" * 64, layout) as namespace:
        path = namespace.path
        (path / "afterglow.json").write_text(description)
        (path / "extents" / "ab").mkdir(parents=True)
        (path / "extents" / "ab" / "x").write_bytes(b"x" * 5000)
        (path / "something-new").symlink_to(outside)
        held = inside("cache", "clear", "--yes", *folder)
        assert held.returncode == 2
        assert f"in use by process {os.getpid()}" in held.stderr
        assert (path / "extents" / "ab" / "x").exists()
    assert inside("cache", "clear", *folder).returncode == 2  # nobody was asked
    with mock.patch("sys.stdin.isatty", return_value=True, create=True), mock.patch("builtins.input") as asked:
        asked.return_value = "n"
        assert inside("cache", "clear", *folder).returncode == 1
        assert f"{path.name}, which cannot be read" in asked.call_args[0][0]
        asked.return_value = "y"
        cleared = inside("cache", "clear", *folder)
    assert cleared.returncode == 0, cleared.stderr
    assert "4.9 KiB freed" in cleared.stdout
    assert [entry.name for entry in path.iterdir()] == ["lock"]
    assert (outside / "mine").exists()
    assert inside("cache", "ls", *folder).stdout == "nothing is stored\n"
    Namespace.open(tmp_path, "m", "0" * 64, layout).close()


@needs_model
def test_a_cache_directory_of_another_format(tmp_path: Path) -> None:
    with Served(tmp_path) as server:
        server.end(signal.SIGTERM)
    description = next(tmp_path.glob("*/afterglow.json"))
    found = json.loads(description.read_text()) | {"format": 999}
    del found["crc32c"]
    description.write_text(json.dumps(found))
    result = afterglow("generate", "-p", "x", "--max-tokens", "1", "--cache-dir", str(tmp_path), *SMALL)
    assert result.returncode == 2
    assert result.stderr.startswith("afterglow: error: ")
    assert "Traceback" not in result.stderr
