"""`afterglow cache`, on disk and through servers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from unittest import mock

import pytest

from afterglow.errors import StoreError
from afterglow.server.lifecycle.address import address_of, announce
from afterglow.server.server_config import ServerConfig
from afterglow.store import admin
from afterglow.store.extents.layout import KVLayout
from afterglow.store.namespace.namespace import Namespace
from tests.cli.kit import inside
from tests.server.conftest import Running, running
from tests.text import toys


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


def test_the_engines_figures_are_told_under_its_name_once(tmp_path: Path) -> None:
    with running(toys.byte_level(tmp_path)) as server:
        said = inside("cache", "stats", "--server", server.url).stdout.splitlines()
        facts = json.loads(inside("cache", "stats", "--server", server.url, "--json").stdout)
    place = said.index("engine")
    assert said[place + 1].split() == ["prompt", "tokens", "0"]
    assert not any(line.strip() == "engine" for line in said[place + 1 :])
    assert facts["engine"]["engine"]["prompt_tokens"] == 0


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


def test_a_name_arrives_as_it_is_or_is_refused(keyed: Running) -> None:
    names = ("..", ".", "a/../b", "..%2F", "v1.5")
    for name in names:
        keyed.openai("two").chat.completions.create(
            model="fake-model", messages=[{"role": "user", "content": "hi"}], extra_body={"session_id": name}
        )
    for name in names:
        removed = ask(keyed, "rm", "--json", name, key="two")
        assert [(each["name"], each["deleted"]) for each in json.loads(removed.stdout)] == [(name, True)]
    for command in ("pin", "rm", "unregister"):
        refused = ask(keyed, command, "\udcff", "--json")
        assert refused.returncode == 1
        assert "the name '\\udcff' is not UTF-8" in refused.stderr


@contextmanager
def other_server(answer: bytes) -> Iterator[str]:
    """Run a server that answers everything with the same JSON, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "answer", [{"models": []}, {"data": None}, {"data": [1]}, {"data": [{"id": "m"}]}, {"data": [{"cached_tokens": 1}]}]
)
def test_an_answer_of_another_kind_of_server_is_said(tmp_path: Path, answer: object) -> None:
    (tmp_path / "prompt").write_text("hi")
    with other_server(json.dumps(answer).encode()) as url:
        for command in (("ls",), ("register", "x", str(tmp_path / "prompt"))):
            result = inside("cache", *command, "--server", url)
            assert result.returncode == 2
            assert f"the server at {url} answers other than Afterglow's" in result.stderr


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
        announce(next(tmp_path.iterdir()), url="http://0.0.0.0:9")
        assert address_of(next(tmp_path.iterdir())) == "http://127.0.0.1:9"
        listed = inside("cache", "ls", "m-", "--cache-dir", str(tmp_path))
        assert (listed.returncode, listed.stdout) == (0, "nothing is stored\n")
        assert "no server answers at http://127.0.0.1:9" in listed.stderr
        with Namespace.open(tmp_path, "n", "1" * 64, layout):
            several = inside("cache", "pin", "x", "--cache-dir", str(tmp_path))
            assert "several namespaces are held" in several.stderr
    assert address_of(next(tmp_path.iterdir())) is None


def test_an_empty_cache_says_so(tmp_path: Path) -> None:
    for name in ("ls", "check", "stats"):
        result = inside("cache", name, "--cache-dir", str(tmp_path))
        assert (result.returncode, result.stdout) == (0, "nothing is stored\n")
    assert json.loads(inside("cache", "check", "--json", "--cache-dir", str(tmp_path)).stdout) == []


@pytest.mark.parametrize("description", ['{"format": 999}', "{", "[]"])
def test_what_another_version_left_can_be_cleared(tmp_path: Path, description: str) -> None:
    """Except where the folder holds what no cache writes: then it may be another program's."""
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
        (path / "catalog.sqlite.damaged").symlink_to(outside)
        for name in ("conversations.sqlite-wal", ".tmp-afterglow.json", "shared-events.json.new"):
            (path / name).write_text("")
        (path / "src").mkdir()
        (path / "src" / "mine").write_text("x")
        held = inside("cache", "clear", "--yes", *folder)
        assert held.returncode == 2
        assert f"in use by process {os.getpid()}" in held.stderr
        assert (path / "extents" / "ab" / "x").exists()
    strange = inside("cache", "clear", "--yes", *folder)
    assert strange.returncode == 2
    assert f"{path} holds src, which this version does not know, and nothing was deleted" in strange.stderr
    assert (path / "extents" / "ab" / "x").exists()
    assert (path / "src" / "mine").exists()
    shutil.rmtree(path / "src")
    assert inside("cache", "clear", *folder).returncode == 2  # standard input is no terminal
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


def two_namespaces(cache: Path) -> list[Path]:
    """Make namespaces a and b, each with 5000 bytes among its extents; return their folders."""
    found = []
    for name, digest in (("a", "0" * 64), ("b", "1" * 64)):
        with Namespace.open(cache, name, digest, KVLayout(1, 1, 8, "F32")) as namespace:
            namespace.extents.mkdir()
            (namespace.extents / "x").write_bytes(b"x" * 5000)
            found.append(namespace.path)
    return found


def test_nothing_is_cleared_where_one_of_several_is_in_use(tmp_path: Path) -> None:
    free, _ = two_namespaces(tmp_path)
    folder = ("--cache-dir", str(tmp_path))
    with Namespace.open(tmp_path, "b", "1" * 64, KVLayout(1, 1, 8, "F32")):
        refused = inside("cache", "clear", "--yes", *folder)
        assert refused.returncode == 2
        assert f"in use by process {os.getpid()}" in refused.stderr
        assert "nothing was deleted" in refused.stderr
        assert (free / "extents" / "x").exists()
        named = inside("cache", "clear", "a-", "--yes", *folder)
        assert (named.returncode, named.stdout) == (0, f"{free.name}: 4.9 KiB freed\n")


@pytest.mark.parametrize("json_too", [False, True])
def test_what_was_cleared_before_a_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json_too: bool
) -> None:
    first, second = two_namespaces(tmp_path)
    clear = admin.clear

    def fails(path: Path) -> int:
        if path == second:
            raise StoreError("the disk is gone")
        return clear(path)

    monkeypatch.setattr(admin, "clear", fails)
    failed = inside("cache", "clear", "--yes", "--cache-dir", str(tmp_path), *["--json"] * json_too)
    assert (failed.returncode, failed.stderr) == (1, "afterglow: error: the disk is gone\n")
    if json_too:
        assert json.loads(failed.stdout) == [{"namespace": first.name, "bytes_freed": 5000}]
    else:
        assert failed.stdout == f"{first.name}: 4.9 KiB freed\n"


COMMANDS = [("ls",), ("stats",), ("check",), ("clear", "--yes"), ("pin", "x")]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_cache_directory_that_cannot_be_looked_at(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    result = inside("cache", *command, "--cache-dir", "/tmp/" + "x" * 300)
    assert result.returncode == 2
    assert result.stderr.startswith("afterglow: error: ")
    assert "x" * 300 in result.stderr

    def refused(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refused)
    result = inside("cache", *command, "--cache-dir", "/tmp")
    assert result.returncode == 2
    assert "the cache directory /tmp cannot be read: Permission denied" in result.stderr


@pytest.mark.parametrize("command", COMMANDS[:-1])
def test_a_namespace_of_another_user_is_left_out(
    tmp_path: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Namespaces are their owners' alone (mode 0700), also in a cache directory that users share."""
    mine, other = two_namespaces(tmp_path)
    real = os.lstat

    def lstat(path: str | Path) -> os.stat_result:
        if Path(path).parent == other:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "lstat", lstat)
    result = inside("cache", *command, "--cache-dir", str(tmp_path))
    monkeypatch.undo()
    assert result.returncode == (1 if command == ("check",) else 0), result.stderr
    assert f"{other} is left out, for it cannot be looked at: Permission denied" in result.stderr
    assert mine.name in result.stdout
    assert other.name not in result.stdout
    assert (other / "extents" / "x").exists()
