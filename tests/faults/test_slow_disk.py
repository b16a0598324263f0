"""A disk that is full, or that does not answer at all, under a whole server: requests that need no disk go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.faults.faulty_server import DEAD, SWITCH
from tests.faults.test_server_faults import BUNDLED, SAID, Server

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here"),
]
SOON = 6.0  # seconds, on a busy machine that may stand still for three; what waits for the disk takes DEAD, five times as long
TEXT = "You are a kind miller who knows the river. " * 8


@pytest.fixture
def dead(tmp_path: Path) -> Iterator[Path]:
    """The switch of a server's disk."""
    switch = tmp_path / f"cache{SWITCH}"
    yield switch
    switch.unlink(missing_ok=True)


def timed(client: httpx.Client, path: str) -> tuple[int, float]:
    began = time.monotonic()
    status = client.get(path).status_code
    return status, time.monotonic() - began


def put(client: httpx.Client, name: str, text: str = TEXT) -> tuple[int, float]:
    began = time.monotonic()
    status = client.put(f"/v1/cache/prompts/{name}", json={"text": text}).status_code
    return status, time.monotonic() - began


def test_a_dead_disk_stalls_no_statistics_and_no_registration(tmp_path: Path, dead: Path) -> None:
    with Server(tmp_path / "cache", "dead", ("--write-policy", "write_through", "--host-cache", "64M")) as server:
        client = server.client
        assert put(client, "early")[0] == 200
        before = server.ask([{"role": "user", "content": SAID[0]}])
        dead.touch()
        for path in 3 * ("/health", "/metrics", "/dashboard/data", "/v1/cache/stats", "/v1/cache/sessions"):
            status, seconds = timed(client, path)
            assert (status, seconds < SOON) == (200, True), (path, seconds)
        with ThreadPoolExecutor(12) as many:
            asked = [many.submit(put, client, f"name{number}", f"{number} {TEXT}") for number in range(10)]
            time.sleep(0.5)
            for path in ("/health", "/metrics", "/v1/cache/sessions"):
                assert timed(client, path)[1] < SOON, path
            assert server.ask([{"role": "user", "content": SAID[0]}]).text == before.text
            found = [one.result() for one in asked]
        assert max(seconds for _, seconds in found) < DEAD / 2, found
        assert {status for status, _ in found} <= {200, 507}, found


def test_a_full_disk_refuses_registrations_at_once_and_leaves_no_trace(tmp_path: Path) -> None:
    with Server(tmp_path / "cache", "full", ("--host-cache", "64M")) as server:
        client = server.client
        for number in range(18):  # more than a tenant may have
            status, seconds = put(client, f"name{number}", f"{number} {TEXT}")
            assert (status, seconds < SOON) == (507, True), (number, status, seconds)
        assert client.get("/v1/cache/prompts").json()["data"] == []
        with ThreadPoolExecutor(10) as many:
            asked = [many.submit(put, client, f"name{number}", f"again {number} {TEXT}") for number in range(10)]
            assert timed(client, "/v1/cache/sessions")[1] < SOON
            assert {one.result()[0] for one in asked} == {507}
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert time.monotonic() - began < 10
