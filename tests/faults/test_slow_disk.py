"""A disk that is full, or that does not answer at all, under a whole server: requests that need no disk go on."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.faults.faulty_server import SWITCH
from tests.faults.test_server_faults import BUNDLED, SAID, Server

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here"),
]
SOON = 6.0  # seconds: those of most, since a busy machine may stand still
TEXT = "You are a kind miller who knows the river. " * 8


@pytest.fixture
def dead(tmp_path: Path) -> Iterator[Path]:
    """The switch of a server's disk."""
    switch = tmp_path / f"cache{SWITCH}"
    yield switch
    switch.unlink(missing_ok=True)


def put(client: httpx.Client, name: str, text: str = TEXT) -> int:
    return client.put(f"/v1/cache/prompts/{name}", json={"text": text}).status_code


def test_a_dead_disk_stalls_no_statistics_and_no_registration(tmp_path: Path, dead: Path) -> None:
    """Everything is answered before any call of the disk returns."""
    with Server(tmp_path / "cache", "dead", ("--write-policy", "write_through", "--host-cache", "64M")) as server:
        client = server.client
        assert put(client, "early") == 200
        before = server.ask([{"role": "user", "content": SAID[0]}])
        dead.touch()
        for path in 3 * ("/health", "/metrics", "/dashboard/data", "/v1/cache/stats", "/v1/cache/sessions"):
            assert client.get(path).status_code == 200, path
        with ThreadPoolExecutor(12) as many:
            asked = [many.submit(put, client, f"name{number}", f"{number} {TEXT}") for number in range(10)]
            time.sleep(0.5)
            for path in ("/health", "/metrics", "/v1/cache/sessions"):
                assert client.get(path).status_code == 200, path
            assert server.ask([{"role": "user", "content": SAID[0]}]).text == before.text
            assert {one.result() for one in asked} <= {200, 507}
        dead.unlink()


def test_a_full_disk_refuses_registrations_at_once_and_leaves_no_trace(tmp_path: Path) -> None:
    with Server(tmp_path / "cache", "full", ("--host-cache", "64M")) as server:
        client = server.client
        took = []
        for number in range(18):  # more than a tenant may have
            began = time.monotonic()
            assert put(client, f"name{number}", f"{number} {TEXT}") == 507
            took.append(time.monotonic() - began)
        assert statistics.median(took) < SOON, took
        assert client.get("/v1/cache/prompts").json()["data"] == []
        with ThreadPoolExecutor(10) as many:
            asked = [many.submit(put, client, f"name{number}", f"again {number} {TEXT}") for number in range(10)]
            assert client.get("/v1/cache/sessions").status_code == 200
            assert {one.result() for one in asked} == {507}
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert time.monotonic() - began < 25, "it waited for the disk, which is tried again after 30 s"
