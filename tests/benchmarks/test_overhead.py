"""The server that benchmarks start."""

from __future__ import annotations

import json
import random
import socket
import subprocess
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
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


@pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="no bundled model here")
def test_variables_change_neither_the_server_nor_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERGLOW_API_KEY", "secret")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    first, last, _ = overhead.http_overhead(random.Random(0), 2, 1)
    assert 0 < first["http_ms"] <= last["http_ms"]


def in_turn() -> dict[str, Any]:
    """Make the row of a library that takes 26 to 30 ms, and of HTTP, which adds 6 ms, 4 more or 4 less."""
    library = [26.0 + n % 5 for n in range(40)]
    return overhead.difference("first token", library, [ms + 6 + 4 * (n % 3 - 1) for n, ms in enumerate(library)])


def test_what_http_adds_differs_by_a_share_of_itself() -> None:
    row = in_turn()
    assert row["value"] == pytest.approx(6)
    assert row["spread"] == pytest.approx(4 / 6, abs=0.01), "not 4 of 32"


def test_what_is_slow_for_both_is_no_noise_of_the_difference() -> None:
    library = [20.0, 30.0, 40.0, 25.0]
    row = overhead.difference("first token", library, [ms + 6 for ms in library])
    assert (row["value"], row["spread"]) == (6, 0)


def test_noise_is_a_share_of_the_goal_where_it_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"name": "x", "value": 1.0, "unit": "", "spread": 0.2}
    monkeypatch.setattr(overhead, "http_overhead", lambda *_: [in_turn(), in_turn(), other])
    monkeypatch.setattr(overhead, "bookkeeping", lambda *_: other | {"value": 0.01})
    monkeypatch.setattr(overhead, "index_match", lambda *_: other | {"extents": 10_000})
    path = tmp_path / "out.json"
    assert overhead.main(["--quick", "--json", str(path)]) == 0
    noise = [goal["spread"] for goal in json.loads(path.read_text())["goals"]]
    assert noise == pytest.approx([4 / 10, 0.2 / 0.8, 0.1, 0.1], abs=0.01)
