"""`afterglow serve` over restarts and signals, in a process of its own."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx

from tests.cli.kit import SMALL, Served, afterglow, inside, needs_model
from tests.waiting import wait_for


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
    unheld = inside("cache", "pin", "ada/1", *folder)
    assert unheld.returncode == 2
    assert "only where a server runs" in unheld.stderr

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

    def listed() -> list[dict[str, Any]]:
        return json.loads(inside("cache", "ls", name, "--json", *folder).stdout)  # type: ignore[no-any-return]

    def saved() -> bool:  # new rows are saved after the reply
        return any(sum(session["cached_tokens"].values()) >= prompt_tokens - 1 for session in listed())

    wait_for(saved)
    assert [session["name"] for session in listed()] == ["ada/1"]
    assert inside("cache", "pin", "ada/1", *folder).stdout == "ada/1: pinned\n"
    table = inside("cache", "ls", name, *folder).stdout.splitlines()
    assert re.match(r"ada/1 +\d+ .* yes$", table[1])
    assert inside("cache", "unpin", "ada/1", "--namespace", name, *folder).returncode == 0
    live = json.loads(inside("cache", "stats", "--json", *folder).stdout)[0]["server"]
    assert (live["sessions"]["count"], live["sessions"]["pinned"], live["responses"]["count"]) == (1, 0, 1)
    assert inside("cache", "ls", name, "--extents", *folder).stdout == "nothing is stored\n"  # it is all in memory
    gone = inside("cache", "rm", "ada/1", "unknown", *folder)
    assert (gone.returncode, gone.stdout) == (1, "ada/1: removed\n")
    assert "there is no conversation 'unknown'" in gone.stderr
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


@needs_model
def test_a_cache_directory_of_another_format(tmp_path: Path) -> None:
    with Served(tmp_path) as server:
        server.end(signal.SIGTERM)
    description = next(tmp_path.glob("*/afterglow.json"))
    found = json.loads(description.read_text()) | {"format": 999}
    del found["crc32c"]
    description.write_text(json.dumps(found))
    result = afterglow(
        "generate", "afterglow-small", "-p", "x", "--max-tokens", "1", "--cache-dir", str(tmp_path), *SMALL
    )
    assert result.returncode == 2
    assert result.stderr.startswith("afterglow: error: ")
    assert "Traceback" not in result.stderr
