"""HTTPS with a real certificate: clients, the dashboard, the command line; and mistakes in the files."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from afterglow.errors import ConfigError
from afterglow.server.lifecycle.address import certificate_of, server_context
from afterglow.server.server_config import ServerConfig
from tests.server.conftest import Running, running
from tests.server.process import Process, serving


@dataclass(frozen=True)
class Files:
    certificate: Path
    key: Path
    other_key: Path
    both: Path
    encrypted: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A self-signed certificate for localhost and 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    found = Files(*(folder / f"{name}.pem" for name in ("certificate", "key", "other", "both", "encrypted")))

    def run(*arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    run("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout", found.key, "-out", found.certificate)  # fmt: skip
    run("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", found.other_key)
    run("pkey", "-in", found.key, "-aes256", "-passout", "pass:secret", "-out", found.encrypted)
    found.both.write_text(found.key.read_text() + found.certificate.read_text())
    return found


@pytest.fixture(scope="module")
def secure(model_dir: Path, files: Files) -> Iterator[Running]:
    config = ServerConfig(port=0, grace=0.5, ssl_certfile=files.certificate, ssl_keyfile=files.key)
    with running(model_dir, config) as value:
        yield value


def trusting(files: Files) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files.certificate)


def test_clients_are_served_over_tls(secure: Running, files: Files) -> None:
    assert secure.url.startswith("https://127.0.0.1:")
    with httpx.Client(base_url=secure.url, verify=trusting(files), timeout=20) as http:
        client = openai.OpenAI(base_url=f"{secure.url}/v1", api_key="none", http_client=http)
        chunks = list(
            client.chat.completions.create(
                model="fake-model", messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True
            )
        )
        assert chunks[-1].choices[0].finish_reason == "length"
        assert http.get("/dashboard").status_code == 200
        assert http.get("/dashboard/data", headers={"Origin": secure.url}).status_code == 200
        assert http.get("/dashboard/data", headers={"Origin": "https://evil.example"}).status_code == 403


def test_what_is_not_tls_does_not_hold_a_place(model_dir: Path, files: Files) -> None:
    """Plain HTTP, and connections that never begin."""
    config = ServerConfig(port=0, grace=0.5, ssl_certfile=files.certificate, ssl_keyfile=files.key, header_timeout=2)
    with running(model_dir, config) as impatient:
        host, port = impatient.url.removeprefix("https://").split(":")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{host}:{port}/health", timeout=10)
        with socket.create_connection((host, int(port)), timeout=20) as silent:
            assert silent.recv(1) == b""
        assert httpx.get(f"{impatient.url}/health", verify=trusting(files), timeout=10).status_code == 200


@pytest.fixture(scope="module")
def process(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("secure")
    with serving(folder, "--ssl-certfile", str(files.both), certificate=files.certificate) as server:
        yield server


def cli(*arguments: str, trusted: Path | None = None, said: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"SSL_CERT_FILE": str(trusted)} if trusted else {})}
    command = [sys.executable, "-m", "afterglow.cli", *arguments]
    return subprocess.run(command, env=environment, input=said, capture_output=True, text=True, timeout=60)


def test_the_command_line_finds_its_own_server(process: Process) -> None:
    """By the cache folder, in which the server says which certificate it has; never the key."""
    cache = process.log.parent / "cache"
    done = cli("cache", "stats", "--cache-dir", str(cache))
    assert (done.returncode, done.stderr) == (0, "")
    missing = cli("cache", "pin", "nothing", "--cache-dir", str(cache))
    assert "says: " in missing.stderr  # it was the server that answered
    (lock,) = cache.glob("*/lock")
    assert "BEGIN CERTIFICATE" in lock.read_text()
    assert "PRIVATE" not in lock.read_text()


def test_the_command_line_wants_to_trust_a_named_server(process: Process, files: Files) -> None:
    for command in (["cache", "ls", "--server"], ["chat", "--max-tokens", "3", "--url"]):
        asked = [*command, process.url]
        refused = cli(*asked, said="Hello\n")
        assert refused.returncode != 0
        assert (
            "its certificate is not trusted; name a file that holds it in the variable SSL_CERT_FILE" in refused.stderr
        )
        done = cli(*asked, trusted=files.certificate, said="Hello\n")
        assert done.returncode == 0, done.stderr


def test_mistakes_in_the_files_are_told(files: Files, tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    for certificate, key, says in (
        (tmp_path / "none.pem", None, r"cannot read --ssl-certfile .*none\.pem: No such file"),
        (tmp_path, None, "cannot read --ssl-certfile .*: Is a directory"),
        (files.certificate, tmp_path / "none.pem", r"cannot read --ssl-keyfile .*none\.pem: No such file"),
        (nonsense, files.key, r"--ssl-certfile .*nonsense\.pem holds no certificate"),
        (files.certificate, nonsense, "hold no usable certificate and key"),
        (files.certificate, None, "its key may be given with --ssl-keyfile"),
        (files.certificate, files.other_key, r"the key in .*other\.pem does not belong to the certificate"),
        (files.certificate, files.encrypted, r"the key in .*encrypted\.pem is encrypted"),
    ):
        with pytest.raises(ConfigError, match=says):
            server_context(ServerConfig(ssl_certfile=certificate, ssl_keyfile=key))
    with pytest.raises(ConfigError, match="needs its certificate: give it with --ssl-certfile"):
        ServerConfig(ssl_keyfile=files.key)
    assert server_context(ServerConfig()) is None
    assert certificate_of(ServerConfig(ssl_certfile=files.both)) == files.certificate.read_text().strip()


def test_a_mistake_in_them_ends_the_start_at_once(files: Files) -> None:
    done = cli("serve", "--port", "0", "--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.other_key))
    assert done.returncode == 2
    assert "does not belong to the certificate" in done.stderr
    assert "Traceback" not in done.stderr
