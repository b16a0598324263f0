"""Registered system prompts on the command line, and over the end of a killed process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import pytest

from tests.cli.kit import BUNDLED, Served, afterglow, inside

pytestmark = pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")

PROMPT = "You keep the old mill near the river. " + " ".join(f"Boat number {n} is blue." for n in range(20))
HELLO = {"role": "user", "content": "Hello, what colour is the boat?"}


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot be read: No such file"), (b" \n", "is empty; write a prompt into it"), (b"\xff", "is not UTF-8")],
)
def test_a_file_that_is_no_prompt_is_named_before_anything_is_loaded(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    file = tmp_path / "prompt.txt"
    if content is not None:
        file.write_bytes(content)
    if content is None:  # a process is dear
        result = afterglow("serve", "--system-prompt-file", str(file))
        assert result.returncode == 2
        assert str(file) in result.stderr
        assert says in result.stderr
        assert len(result.stderr.splitlines()) == 1
    registered = inside("cache", "register", "default", str(file), "--server", "http://127.0.0.1:9")
    assert registered.returncode == 2
    assert says in registered.stderr


def test_prompts_outlive_a_killed_server_and_are_let_go_by_name(tmp_path: Path) -> None:
    file, own = tmp_path / "prompt.txt", tmp_path / "own.txt"
    file.write_text(PROMPT)
    own.write_text("You are the miller. " * 12)
    cache = tmp_path / "cache"
    folder = ("--cache-dir", str(cache))
    with Served(cache, "--system-prompt-file", str(file)) as server:
        said = inside("cache", "register", "default", str(own), "--cache-salt", "a", *folder)
        assert said.returncode == 0, said.stderr
        assert "default: " in said.stdout
        assert "kept in all tiers" in said.stdout
        first = server.ask(messages=[HELLO], cache_salt="a", max_tokens=2)
        listed = json.loads(inside("cache", "ls", "--cache-salt", "a", "--server", server.url, "--json").stdout)
        assert [(card["name"], card["shared"]) for card in listed] == [("system-prompt", True), ("default", False)]
        tokens = listed[1]["tokens"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens
        server.end(signal.SIGKILL)
    pinned = _pinned(cache, folder)
    assert sorted(pinned) == ["default", "system-prompt"]
    assert inside("cache", "check", *folder).returncode == 0
    with Served(cache, "--system-prompt-file", str(file)) as server:
        again = server.ask(messages=[HELLO], cache_salt="a", max_tokens=2)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= tokens
        names = ("--cache-salt", "a", *folder)
        for name, remedy in (("default", "cache unregister"), ("system-prompt", "without --system-prompt-file")):
            refused = inside("cache", "rm", name, *names)
            assert refused.returncode == 1
            assert remedy in refused.stderr
        assert inside("cache", "unregister", "default", *names).stdout == "default: not registered any more\n"
        assert inside("cache", "unregister", "default", *names).returncode == 1
        shared = server.ask(messages=[HELLO], cache_salt="a", max_tokens=2)
        table = inside("cache", "ls", "--server", server.url).stdout
        assert "system prompt of all tenants" in table
        metrics = httpx.get(f"{server.url}/metrics").text
        assert "afterglow:registered_prefixes" in metrics
        assert shared["usage"]["prompt_tokens"] != again["usage"]["prompt_tokens"]
        assert server.end(signal.SIGTERM)[0] == 0
    assert sorted(_pinned(cache, folder)) == ["system-prompt"]


def _pinned(cache: Path, folder: tuple[str, ...]) -> set[str]:
    (space,) = json.loads(inside("cache", "ls", "--json", *folder).stdout)
    found = json.loads(inside("cache", "ls", space["namespace"], "--extents", "--json", *folder).stdout)
    return {extent["system_prompt"] for extent in found} - {None}
