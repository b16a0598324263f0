"""Models of the hub: downloads from a small hub of our own, by the real library, in processes of their own."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from afterglow.errors import ModelError
from afterglow.library.locate import find_model, model_name
from tests.cli.kit import BUNDLED, afterglow, inside, needs_model
from tests.text import gguf_toys

COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """The few answers of the hub that downloads need: what a model is, its files, and a file."""

    models: dict[str, dict[str, bytes]]

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        found = re.fullmatch(r"(?:/api/models)?/(?P<name>[^/]+/[^/]+)(?P<rest>/.*)?", path)
        assert found is not None, path
        name, rest = found["name"], found["rest"] or ""
        if name == "org/gated":
            return self._send(
                403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model is restricted"}
            )
        if name == "org/broken":
            return self._send(500, b"sorry")
        if name not in self.models:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository Not Found"})
        files = self.models[name]
        if path.startswith("/api/models"):
            if "/tree/" in rest:
                listed = [
                    {"type": "file", "path": file, "size": len(data), "oid": _tag(data)} for file, data in files.items()
                ]
                return self._json(listed)
            siblings = [{"rfilename": file} for file in files]
            return self._json({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings})
        data = files[unquote(rest.split("/", 3)[3])]
        head = {"ETag": f'"{_tag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        return self._send(200, data, head, with_body)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, data: bytes, head: dict[str, str] | None = None, with_body: bool = True) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(data)), **(head or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def _tag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("hub")
    toy = gguf_toys.byte_level(folder / "toy.gguf").read_bytes()
    small = {path.name: path.read_bytes() for path in BUNDLED.iterdir() if path.is_file()}
    return {
        "org/small": {
            **small,
            "README.md": b"#",
            "consolidated.safetensors": b"x",
            "onnx/model.onnx": b"x",
            "a.bin": b"x",
        },
        "org/toys": {"toy-Q8_0.gguf": toy, "big-00001-of-00002.gguf": toy, "big-00002-of-00002.gguf": toy},
        "org/brackets": {"a[Q4].gguf": toy, "aQ.gguf": toy, "b*.gguf": toy, "bc.gguf": toy},
        "org/pickles": {"config.json": b"{}", "pytorch_model.bin": b"x"},
    }


@pytest.fixture(scope="module")
def address(models: dict[str, dict[str, bytes]]) -> Iterator[str]:
    handler = type("Served", (Hub,), {"models": models})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hub(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Have this process ask our hub, with an empty cache. Return the variables with which another process does."""
    constants = {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "hf/hub"),
        "HF_HUB_OFFLINE": False,
    }
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    return {
        "HF_ENDPOINT": address,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


@needs_model
def test_a_directory_is_downloaded_once_and_found_without_the_hub(hub: dict[str, str]) -> None:
    args = ("generate", "org/small", "-p", "My name is", "--max-tokens", "2", "--disk-cache", "0")
    first = afterglow(*args, **hub)
    assert first.returncode == 0, first.stderr
    nowhere = hub | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    again = afterglow(*args, **nowhere)
    assert again.stdout == first.stdout != ""
    pulled = inside("pull", "org/small")
    folder = Path(pulled.stdout.strip())
    assert {path.name for path in folder.iterdir()} == {path.name for path in BUNDLED.iterdir()} - {"README.md"}


@needs_model
def test_what_is_missing_is_downloaded(hub: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_model("org/small")
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).unlink()  # as if the download had ended in the middle
        assert find_model("org/small") == folder
        assert (folder / name).is_file()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert find_model("org/small") == folder
    offline = inside("pull", "org/small")
    assert offline.returncode == 2
    assert "org/small cannot be downloaded from http://127.0.0.1:9" in offline.stderr
    assert offline.stderr.count("\n") == 1


def test_one_gguf_file_with_all_its_parts(hub: dict[str, str]) -> None:
    pulled = inside("pull", "org/toys:toy-Q8_0.gguf")
    path = Path(pulled.stdout.strip())
    assert path.name == "toy-Q8_0.gguf"
    assert path.read_bytes()[:4] == b"GGUF"
    assert len(list(path.parent.iterdir())) == 1
    parts = Path(inside("pull", "org/toys:big-00001-of-00002.gguf").stdout.strip())
    assert parts.with_name("big-00002-of-00002.gguf").is_file()


@pytest.mark.parametrize("name", ["a[Q4].gguf", "aQ.gguf", "b*.gguf"])
def test_a_name_of_a_file_is_no_pattern(hub: dict[str, str], name: str) -> None:
    path = Path(inside("pull", f"org/brackets:{name}").stdout.strip())
    assert path.is_file()
    assert [file.name for file in path.parent.iterdir()] == [name]


def test_a_download_that_brings_no_file_is_an_error(
    hub: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **options: str(tmp_path))
    result = inside("pull", "org/toys:toy-Q8_0.gguf")
    assert result.returncode == 2
    assert "the download of org/toys:toy-Q8_0.gguf has ended without the file" in result.stderr
    assert result.stderr.count("\n") == 1


def test_one_gguf_file_is_downloaded_where_a_model_is_named(
    hub: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = find_model("org/toys:big-00001-of-00002.gguf")
    assert path.read_bytes()[:4] == b"GGUF"
    assert model_name("org/toys:big-00001-of-00002.gguf", path) == "org/toys:big-00001-of-00002.gguf"
    with pytest.raises(ModelError, match=r"on this machine, and org/toys has no file other\.gguf"):
        find_model("org/toys:other.gguf")
    path.with_name("big-00002-of-00002.gguf").unlink()  # as if the download had ended in the middle
    assert find_model("org/toys:big-00001-of-00002.gguf") == path
    assert path.with_name("big-00002-of-00002.gguf").is_file()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert find_model("org/toys:big-00001-of-00002.gguf") == path
    near = Path("org", "toys:near.gguf")  # a file of that name is nearer
    monkeypatch.chdir(path.parent)
    near.parent.mkdir()
    near.symlink_to(path)
    assert find_model(str(near)) == near


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("org/none", "http://127.0.0.1:.* has no model org/none"),
        ("org/gated", "org/gated is gated: accept its terms at http://127.0.0.1:.*/org/gated, and log in"),
        ("org/broken", "org/broken cannot be downloaded from .*500"),
        ("org/toys", r"org/toys has GGUF files: name one, as in org/toys:toy-Q8_0\.gguf"),
        ("org/toys:other.gguf", r"org/toys has no file other\.gguf; its GGUF files: toy-Q8_0\.gguf, big-00001"),
        ("org/pickles", "org/pickles has no safetensors and no GGUF file"),
        ("nonsense", "'nonsense' names no model on the hub: give OWNER/NAME"),
    ],
)
def test_answers_of_the_hub_are_one_line(hub: dict[str, str], model: str, says: str) -> None:
    result = inside("pull", model)
    assert result.returncode == 2
    assert re.search(says, result.stderr), result.stderr
    assert result.stderr.count("\n") == 1
    if model == "org/none":
        served = inside("serve", model, "--port", "0")
        assert served.returncode == 2
        assert "there is no model 'org/none' on this machine, and http" in served.stderr


def test_a_model_that_was_not_downloaded_is_not_asked_for_offline(
    hub: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = inside("generate", "org/small", "-p", "x")
    assert result.returncode == 2
    assert "HF_HUB_OFFLINE forbids downloads" in result.stderr
    assert result.stderr.count("\n") == 1
