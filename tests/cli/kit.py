"""The command line as a user meets it: in processes of its own, or in this one."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from afterglow.cli import main
from tests.ports import own_port
from tests.waiting import wait_for

BUNDLED = Path(__file__).parents[2] / "src/afterglow/assets/model"
SMALL = ("--device-cache", "64M", "--host-cache", "64M", "--disk-cache", "64M", "--threads", "1")


# A server that ends with this process, even with a killed one: then the other end of its standard input is closed.
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


needs_model = pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")


class Served:
    """`afterglow serve` in a process, on the bundled model where no other is named."""

    def __init__(self, cache: Path, *args: str, model: str = "afterglow-small") -> None:
        self.port = own_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", TIED, "serve", model, "--port", str(self.port),
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
        deadline = time.monotonic() + 180
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

    def _ends(self) -> bool:
        """Has the server taken note of a signal? Then it accepts no connection."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
        except ConnectionRefusedError:
            return True
        except OSError:  # it has not answered yet
            pass
        return False

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        """A test that fails shall not leave its server behind."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self.tie.close()

    def end(self, *signals: signal.Signals) -> tuple[int, str]:
        for place, number in enumerate(signals):
            if place:  # two at once would be taken for one
                wait_for(self._ends, 60)
                time.sleep(0.7)
            self.process.send_signal(number)
        _, log = self.process.communicate(timeout=30)
        return self.process.returncode, log
