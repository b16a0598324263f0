"""The dashboard: its page, its data, who may see them, and that nothing waits for the engine."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.engine.stats import EngineCounters, EngineStats, TierBytes, Tiers
from afterglow.plan.stats import Counters, Stats
from afterglow.server.api import dashboard
from afterglow.server.api.dashboard import FIELDS, OF_THE_SERVER, PATHS, SHARES, History, page
from afterglow.server.lifecycle.service import Service
from afterglow.server.metrics.collector import flatten
from afterglow.server.metrics.metric_names import number_at
from afterglow.server.server_config import ServerConfig
from afterglow.store.moving.store_stats import StoreStats
from afterglow.text import Tokenizer
from tests.server.conftest import Running, running
from tests.waiting import wait_for

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
    assert "The MIT License" in text  # of the library inside
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
    table = flatten(full_stats())
    assert [path for path in PATHS.values() if number_at(table, path) is None] == []
    assert not set(OF_THE_SERVER) & set(PATHS)
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
    assert data["ttft"].keys() == {"lengths", "sooner"}
    assert data["per_token"].keys() == {"requests", "median", "p95"}
    assert data["history"]["values"]["process_memory_bytes"][0] > 2**20
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
        ttft = http.get(DATA).json()["ttft"]
        (length,) = ttft["lengths"]
        assert length["tokens"] == 64 >= seen[0][2] == seen[1][2]
        assert (length["without"]["requests"], length["with"]["requests"]) == (1, 1)
        assert ttft["sooner"] == pytest.approx(length["without"]["median"] / length["with"]["median"])


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


def test_only_prompts_of_like_length_are_compared() -> None:
    """Short prompts without reuse and long ones with it say nothing about reuse."""
    history = History()
    for number in range(1, 101):
        history.answered(1000.0, number / 100, 100, 95)  # at most 128 tokens
    for ttft, cached in ((4.0, 9), (2.0, 50), (9.0, 20)):  # without, with, and neither
        history.answered(1000.0, ttft, 100, cached)
    history.answered(1000.0, 0.2, 64, 0)  # at most 64: without reuse, and sooner than those with it
    history.answered(1.0, 9.0, 100, 50)  # too long ago
    found = history.ttft(1100.0)
    short, long = found["lengths"]
    nothing = {"requests": 0, "median": None, "p95": None}
    assert short == {"tokens": 64, "without": {"requests": 1, "median": 0.2, "p95": 0.2}, "with": nothing}
    assert long == {
        "tokens": 128,
        "without": {"requests": 1, "median": 4.0, "p95": 4.0},
        "with": {"requests": 101, "median": 0.51, "p95": 0.96},
    }
    assert found["sooner"] == pytest.approx(4.0 / 0.51)
    history.answered(1000.0, 8.0, 4097, 0)
    history.answered(1000.0, 1.0, 8192, 8000)
    assert [length["tokens"] for length in history.ttft(1100.0)["lengths"]] == [64, 128, 8192]
    assert history.ttft(1100.0)["sooner"] == pytest.approx((4.0 / 0.51 * 8.0) ** 0.5)  # one pair each
    assert History().ttft(0.0) == {"lengths": [], "sooner": None}


def test_times_between_tokens() -> None:
    history = History()
    for per_token in (0.1, 0.2, 0.3, None):
        history.answered(1000.0, 1.0, 10, 0, per_token)
    assert history.per_token(1001.0) == {"requests": 3, "median": 0.2, "p95": 0.3}


def test_what_went_wrong_is_shown(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "INTERVAL", 0.02)
    with running(model_dir, hold=True, max_queue=1) as server, server.http() as http:
        waiting = threading.Thread(target=lambda: http.post("/v1/chat/completions", json=HI))
        waiting.start()
        wait_for(lambda: server.engine.in_flight == 1)
        assert http.post("/v1/chat/completions", json=HI).status_code == 429
        assert http.post("/v1/chat/completions", json={"messages": 1}).status_code == 400
        server.engine.gate.set()
        waiting.join()
        server.engine.fail = "out of luck"
        assert http.post("/v1/chat/completions", json=HI).status_code == 500
        server.service.state.metrics.response(499)

        def told() -> dict[str, float]:
            values = http.get(DATA).json()["history"]["values"]
            return {name: values[f"http_{name}"][-1] for name in ("refused", "busy", "failed", "gone")}

        wait_for(lambda: told() == {"refused": 1, "busy": 1, "failed": 1, "gone": 1})
        assert "process_resident_memory_bytes" in http.get("/metrics").text


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

    holder = threading.Thread(target=lambda: engine.ask(hold))
    holder.start()
    try:
        assert busy.wait(20)
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
    assert {name: now[name] for name in PATHS} == {name: number_at(table, path) for name, path in PATHS.items()}
    assert set(now) == set(FIELDS)
    assert now["plan_sessions"] == 1
    assert data["budgets"]["device"] == engine.stats().tiers.device.capacity
    found = sum(now[f"cached_tokens_{tier}"] for tier in ("device", "host", "disk"))
    missed = sum(value for name, value in now.items() if name.startswith("plan_missed_"))
    assert found + missed + now["plan_recomputed"] == now["prompt_tokens"]  # nothing is left out of the page


# --------------------------------------------------------------------------------------------------- in a browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOOK = """<script>setTimeout(() => {
  const bare = [...document.querySelectorAll(".tile b, td, .meter span, .legend b")].map(e => e.textContent.trim());
  const boxes = [document.documentElement, ...document.querySelectorAll(".scroll, .card, .tile")];
  document.body.innerHTML = "";
  const wide = boxes.map(b => b.dataset.over).filter(Boolean);
  document.body.append("RESULT" + JSON.stringify({bare: bare.filter(t => /^[\\d.,]+$/.test(t)), numbers: bare.length, wide}) + "END");
}, 4000);
setTimeout(() => { for (const b of [document.documentElement, ...document.querySelectorAll(".scroll, .card, .tile")])
  if (b.scrollWidth > b.clientWidth) b.dataset.over = `${b.className || b.tagName} ${b.textContent.slice(0, 40)}`; }, 3500);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [420, 1280])
def test_the_page_fits_and_every_number_has_a_unit(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(dashboard, "INTERVAL", 0.02)
    with running(model_dir) as server, server.http() as http:
        counters = {field.name: 1_234_567 for field in fields(Counters)}
        numbers = {field.name: 1_234_567 for field in fields(EngineCounters) if field.type in ("int", "float")}
        bytes_of = TierBytes(1_234_567, 1_234_567)
        stats = dataclasses.replace(
            full_stats(**counters),
            engine=EngineCounters(**numbers),  # type: ignore[arg-type]
            tiers=Tiers(bytes_of, bytes_of, bytes_of),
        )
        monkeypatch.setattr(server.engine, "stats", lambda: stats)
        for _ in range(2):
            http.post("/v1/chat/completions", json={**HI, "session_id": "a conversation with a rather long name"})
        wait_for(lambda: len(http.get(DATA).json()["history"]["requests"]) == 2)
        told = {"/dashboard/data": http.get(DATA).content, "/v1/cache/sessions": http.get("/v1/cache/sessions").content}

    class Pages(BaseHTTPRequestHandler):
        """The page without its policy, with a script that looks at it."""

        def do_GET(self) -> None:
            body = told.get(self.path.split("?")[0], bytes(page().body).replace(b"</body>", LOOK.encode() + b"</body>"))
            self.send_response(200)
            self.send_header("Content-Type", "application/json" if self.path.split("?")[0] in told else "text/html")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        assert CHROMIUM is not None
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars")
        ran = subprocess.run(
            [CHROMIUM, *flags, f"--user-data-dir={tmp_path}", "--virtual-time-budget=6000", f"--window-size={width},2000",
             "--dump-dom", f"http://127.0.0.1:{pages.server_port}/"],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        pages.shutdown()
    found = re.search(r"RESULT(.*)END", ran.stdout)
    assert found is not None, ran.stderr[-2000:]
    result = json.loads(html.unescape(found[1]))
    assert result["numbers"] > 80
    assert (result["wide"], result["bare"]) == ([], [])
