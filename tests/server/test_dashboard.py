"""The dashboard: its page, its data, who may see them, and that nothing waits for the engine."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.engine.stats import EngineStats
from afterglow.plan.stats import Counters, Stats
from afterglow.server import dashboard
from afterglow.server.dashboard import FIELDS, SHARES, History, page
from afterglow.server.launch import Service
from afterglow.server.metrics import flatten
from afterglow.server.settings import ServerConfig
from afterglow.store.kvstore import StoreStats
from afterglow.text import Tokenizer
from tests.server.conftest import Running, running, wait_for

BUNDLED = Path(__file__).parents[2] / "src/afterglow/assets/model"
DATA = "/dashboard/data"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi, who is there, and why?"}], "max_tokens": 3}


def full_stats(**counters: int) -> EngineStats:
    """Statistics in which everything is known."""
    levels = {field.name: 1 for field in fields(Stats) if field.name != "counters"}
    plan = Stats(**levels, counters=Counters(**counters))
    return EngineStats(plan=plan, store=StoreStats())


# ----------------------------------------------------------------------------------------------------- the page


def test_the_page_is_served_to_everybody_and_says_nothing(model_dir: Path) -> None:
    with running(model_dir, ServerConfig(port=0, grace=0.5, api_key=("secret",))) as server, server.http() as http:
        answer = http.get("/dashboard")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "fake-model" not in answer.text
        assert "secret" not in answer.text
        assert http.head("/dashboard").status_code == 200
        assert http.post("/dashboard").status_code == 401
        assert http.get("/dashboard/").status_code == 401


def test_the_root_leads_to_it(model_dir: Path) -> None:
    with running(model_dir, ServerConfig(port=0, grace=0.5, api_key=("secret",))) as server, server.http() as http:
        for answer in (http.get("/"), http.head("/")):
            assert (answer.status_code, answer.headers["location"]) == (307, "dashboard")
        page = http.get("/", follow_redirects=True)
        assert page.url.path == "/dashboard"
        assert "--admin-key" in page.text  # whose numbers these are, and which key shows them
        assert http.post("/").status_code == 401


def test_the_page_needs_nothing_but_itself() -> None:
    text = bytes(page().body).decode()
    assert "SCRIPT-OF-UPLOT" not in text
    assert "STYLE-OF-UPLOT" not in text
    assert "The MIT License" in text  # of what is in it
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=\"(?!data:)", text)
    assert not re.search(r"url\(|@import|\son\w+=\"|\sstyle=\"", text)
    assert len(text) < 100_000


def test_the_policy_allows_what_is_in_the_page_and_no_more() -> None:
    text, policy = bytes(page().body).decode(), page().headers["content-security-policy"]
    directives = dict(part.split(" ", 1) for part in policy.split("; "))
    assert directives["default-src"] == directives["frame-ancestors"] == "'none'"
    assert directives["connect-src"] == "'self'"
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        assert text.count(f"<{tag}") == text.count(f"<{tag}>") == 2
        for inner in text.split(f"<{tag}>")[1:]:
            digest = hashlib.sha256(inner.split(f"</{tag}>")[0].encode()).digest()
            assert f"'sha256-{base64.b64encode(digest).decode()}'" in directives[f"{tag}-src"]


def test_the_page_asks_for_fields_that_there_are() -> None:
    """A number that is renamed must be renamed here too: the page would show a dash for it for ever."""
    assert set(FIELDS) <= flatten(full_stats()).keys()
    text = (files("afterglow") / "server/static/dashboard.html").read_text("utf-8")
    asked = set(re.findall(r"[\"'`]((?:plan|store|load|cached|device|host|disk|prompt)_\w+)[\"'`]", text))
    assert len(asked) > 20
    assert asked <= {*FIELDS, "prompt_tokens"}
    assert all(f"{share}: [" in text for share, _ in SHARES)


# ----------------------------------------------------------------------------------------------------- the data


def test_the_shape_of_the_data(server: Running) -> None:
    with server.http() as http:
        wait_for(lambda: http.get(DATA).json()["history"]["last"] >= 0)
        answer = http.get(DATA)
        assert answer.headers["cache-control"] == "no-store"
        data = answer.json()
    assert data["object"] == "dashboard"
    assert (data["model"], data["status"], data["samples"], data["interval"]) == ("fake-model", "running", 600, 1.0)
    assert data["budgets"] == {"device": 100, "host": 0, "disk": 0}
    assert [group["share"] for group in data["ttft"]] == ["none", "some", "half", "most"]
    history = data["history"]
    assert tuple(history["values"]) == FIELDS
    assert {len(column) for column in history["values"].values()} == {len(history["time"])}
    assert history["values"]["running"][0] == 0
    assert history["values"]["plan_read_rate"][0] is None  # the fake engine has no plan


def test_requests_are_told_once_with_how_much_was_cached(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "INTERVAL", 0.02)
    with running(model_dir) as server, server.http() as http:
        for _ in range(2):
            assert http.post("/v1/chat/completions", json=HI).status_code == 200
        assert http.post("/v1/chat/completions", json={"messages": 1}).status_code == 400
        seen: list[Any] = []
        last = -1

        def poll() -> int:
            nonlocal last
            history = http.get(DATA, params={"after": last}).json()["history"]
            assert history["last"] - last == len(history["time"])
            last = history["last"]
            seen.extend(history["requests"])
            return len(seen)

        wait_for(lambda: poll() >= 2)
        for _ in range(3):
            poll()
        assert [(cached > 0, share) for _, _, _, cached, share in seen] == [(False, "none"), (True, "most")]
        assert all(ttft > 0 for _, ttft, _, _, _ in seen)
        groups = {group["share"]: group for group in http.get(DATA).json()["ttft"]}
        assert [groups[name]["requests"] for name in ("none", "some", "half", "most")] == [1, 0, 0, 1]
        assert groups["some"]["median"] is None
        assert groups["most"]["prompt_tokens"] == seen[1][2]


@pytest.mark.parametrize("after", ["x", "-2", "1.5", "", "9" * 16, "١"])
def test_a_wrong_sample_number_is_refused(server: Running, after: str) -> None:
    with server.http() as http:
        answer = http.get(DATA, params={"after": after})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "after"


def test_a_number_of_a_server_before_this_one_brings_nothing(server: Running) -> None:
    with server.http() as http:
        data = http.get(DATA, params={"after": 10**9}).json()
    assert data["history"]["time"] == []
    assert set(map(len, data["history"]["values"].values())) == {0}
    assert data["run"]  # by which the page sees that it must ask anew


# ------------------------------------------------------------------------------------------------------- rights


@pytest.mark.parametrize(
    ("keys", "admin", "statuses"),
    [
        ((), None, {"": 200}),
        (("k",), None, {"": 401, "wrong": 401, "k": 200}),
        (("k", "l"), None, {"": 401, "k": 403}),
        (("k",), "boss", {"": 401, "k": 403, "boss": 200}),
        ((), "boss", {"": 403, "boss": 200}),
    ],
)
def test_the_data_has_the_rights_of_metrics(
    model_dir: Path, keys: tuple[str, ...], admin: str | None, statuses: dict[str, int]
) -> None:
    config = ServerConfig(port=0, grace=0.5, api_key=keys, admin_key=admin)
    with running(model_dir, config) as server, server.http() as http:
        for key, status in statuses.items():
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            assert http.get(DATA, headers=headers).status_code == status
            assert http.get("/metrics", headers=headers).status_code == status


# ------------------------------------------------------------------------------------------------------ history


def test_the_history_is_bounded() -> None:
    history = History(samples=5, requests=3)
    for number in range(20):
        history.sample(full_stats(submitted=number, thrashed=number), 100.0 + number)
        history.answered(100.5 + number, 0.1, 10, 0)
    found = history.after(-1)
    assert found["last"] == 19
    assert found["time"] == [115, 116, 117, 118, 119]
    assert found["values"]["plan_thrashed"] == (15, 16, 17, 18, 19)
    assert [request[0] for request in found["requests"]] == [117.5, 118.5]  # the third is told with the next sample
    assert history.after(17)["time"] == [118, 119]
    assert history.after(19)["time"] == []
    assert history.after(3)["time"] == found["time"]


def test_quantiles_by_share() -> None:
    history = History()
    for number in range(1, 101):
        history.answered(1000.0, number / 100, 100, 95)
    history.answered(1000.0, 5.0, 200, 19)
    history.answered(1000.0, 3.0, 100, 10)
    history.answered(1.0, 9.0, 100, 50)  # too long ago
    said = {group.pop("share"): group for group in history.ttft(1100.0)}
    assert said["most"] == {"from": 0.9, "requests": 100, "median": 0.5, "p95": 0.95, "prompt_tokens": 100}
    assert said["none"] == {"from": 0.0, "requests": 1, "median": 5.0, "p95": 5.0, "prompt_tokens": 200}
    assert said["some"]["requests"] == 1
    assert said["half"] == {"from": 0.5, "requests": 0, "median": None, "p95": None, "prompt_tokens": None}


def test_statistics_that_fail_end_nothing(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "INTERVAL", 0.01)
    with running(model_dir) as server, server.http() as http:
        wait_for(lambda: http.get(DATA).json()["history"]["last"] >= 0)
        with monkeypatch.context() as broken:
            broken.setattr(server.engine, "stats", lambda: 1 / 0)
            time.sleep(0.05)
            assert http.get("/health").status_code == 200
        last = http.get(DATA).json()["history"]["last"]
        wait_for(lambda: http.get(DATA).json()["history"]["last"] > last)


# --------------------------------------------------------------------------------------------------- not waiting


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, str]]:
    if not (BUNDLED / "config.json").is_file():
        pytest.skip("no bundled model here")
    monkeypatch.setattr(dashboard, "INTERVAL", 0.02)
    cache = CacheConfig(device_cache=16 << 20, host_cache=16 << 20, disk_cache=32 << 20, cache_dir=tmp_path)
    engine = Engine.load(BUNDLED, EngineConfig(threads=1, cache=cache))
    engine.start()
    service = Service(engine, Tokenizer(BUNDLED), ServerConfig(port=0, grace=0.5), BUNDLED)
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: service.started)
    yield engine, service.address
    service.stop()
    thread.join(20)
    engine.close()


def test_a_busy_engine_keeps_nobody_waiting(real: tuple[Engine, str]) -> None:
    """The engine's thread does nothing at all for a while: samples go on, and are served."""
    engine, url = real
    go, busy = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        go.wait(30)

    holder = threading.Thread(target=lambda: engine._on_thread(hold))
    holder.start()
    try:
        assert busy.wait(5)
        with httpx.Client(base_url=url, timeout=10) as http:
            first = http.get(DATA).json()
            assert None not in [first["history"]["values"][name][0] for name in ("plan_sessions", "load_bytes")]
            wait_for(lambda: http.get(DATA).json()["history"]["last"] > first["history"]["last"] + 2)
            assert http.get("/dashboard").status_code == 200
        assert not go.is_set()
    finally:
        go.set()
        holder.join(10)


def test_the_numbers_are_the_engines(real: tuple[Engine, str]) -> None:
    engine, url = real
    with httpx.Client(base_url=url, timeout=60) as http:
        for _ in range(2):
            assert http.post("/v1/chat/completions", json={**HI, "session_id": "one"}).status_code == 200
        engine.settle()
        before = http.get(DATA).json()["history"]["last"]
        wait_for(lambda: http.get(DATA).json()["history"]["last"] > before)
        data = http.get(DATA).json()
    now = {name: column[-1] for name, column in data["history"]["values"].items()}
    table = flatten(engine.stats())
    assert now == {name: table.get(name) for name in FIELDS}
    assert now["plan_sessions"] == 1
    assert data["budgets"]["device"] == engine.stats().device_capacity_bytes
    found = sum(now[f"cached_tokens_{tier}"] for tier in ("device", "host", "disk"))
    missed = sum(value for name, value in now.items() if name.startswith("plan_missed_"))
    assert found + missed + now["plan_recomputed"] == now["prompt_tokens"]  # nothing is left out of the page
