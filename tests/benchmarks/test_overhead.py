"""The server that benchmarks start."""

from __future__ import annotations

import socket
import subprocess
from contextlib import ExitStack
from importlib.resources import files
from typing import Any

import httpx
import pytest

from afterglow.bench import overhead

MODEL = files("afterglow") / "assets" / "model"


@pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="no bundled model here")
def test_a_server_needs_no_port_that_was_free_before(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen
    with ExitStack() as others:

        def take(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
            port = int(command[command.index("--port") + 1])
            others.enter_context(socket.create_server(("127.0.0.1", port)))
            return start(command, **how)

        monkeypatch.setattr(subprocess, "Popen", take)
        with overhead.model_server([str(MODEL), "--disk-cache", "0", "--threads", "1"]) as url:
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "m"
