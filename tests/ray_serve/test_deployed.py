"""`afterglow.ray:app` from scratch: Ray on this machine, two replicas of the bundled model, clients, and a kill -9."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.waiting import wait_for

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

# Ray as `ray start --head` would start it, small, ending with this process, and then what `serve run` does.
DRIVER = """
import json, sys
import ray
from ray import serve
from afterglow.ray import app
settings = json.loads(sys.argv[1])
ray.init(address="local", include_dashboard=False, log_to_driver=False, **settings["ray"])
serve.start(http_options={"port": settings["port"]})
serve.run(app(settings["args"]))
print("ready", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""
SESSIONS = [f"talk {number}" for number in range(8)]
STORY = "The boat is blue and the house is red. " * 12


class Deployed:
    """The application on Ray, as its users and its operator see it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.url = folder, f"http://127.0.0.1:{port}"
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def turn(self, session: str, *texts: str) -> Any:
        """Send a conversation of these texts, of the user and the assistant by turns."""
        messages: Any = [
            {"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)
        ]
        return self.client.chat.completions.create(
            model="afterglow-small",
            messages=messages,
            max_tokens=4,
            temperature=0,
            extra_headers={"X-Session-ID": session},
        )

    def home(self, session: str | None = None) -> str:
        """Tell the replicas apart by when they made a metric: their processes may begin in one hundredth of a second."""
        named = {} if session is None else {"X-Session-ID": session}
        text = httpx.get(f"{self.url}/metrics", headers=named, timeout=60).text
        found = re.search(r"^vllm:time_to_first_token_seconds_created\{.*\} (\S+)", text, re.MULTILINE)
        assert found is not None, text[:200]
        return found[1]

    @property
    def pids(self) -> dict[str, int]:
        """List the replicas' processes, by their folders; not one that is just writing its own."""
        found = {}
        for lock in self.folder.glob("cache/default/replica-*/*/lock"):
            with contextlib.suppress(ValueError):
                found[lock.parents[1].name] = json.loads(lock.read_text())["pid"]
        return found


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("ray")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    args = {
        "model": "afterglow-small",
        "replicas": "2",
        "cpus": "0.5",
        "threads": "1",
        "cache_dir": str(folder / "cache"),
    }
    args |= {"device_cache": "64M", "host_cache": "64M", "disk_cache": "64M", "log_level": "warning"}
    settings = {"ray": {"num_cpus": 2, "object_store_memory": 100 * 1024**2}, "port": port, "args": args}
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
    env["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"  # on a busy machine 5 s are not enough
    env["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # otherwise Ray writes one to the home directory
    with open(folder / "log", "wb") as log:
        command = [sys.executable, "-c", DRIVER, json.dumps(settings)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env)
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            said = process.stdout.readline()
            while said and said != b"ready\n":
                said = process.stdout.readline()
            assert said, (folder / "log").read_text()[-4000:]
            yield Deployed(folder, port)
        finally:
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def test_a_conversation_stays_with_its_replica(deployed: Deployed) -> None:
    homes = {session: deployed.home(session) for session in SESSIONS}
    assert len(set(homes.values())) == 2
    for session in SESSIONS:
        first = deployed.turn(session, f"{session}. {STORY}")
        reply = first.choices[0].message.content
        second = deployed.turn(session, f"{session}. {STORY}", reply, "And then?")
        assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 64 * 64
    assert {session: deployed.home(session) for session in SESSIONS} == homes


def test_requests_without_a_session_go_to_all(deployed: Deployed) -> None:
    assert len({deployed.home() for _ in range(24)}) == 2


def test_replies_stream_and_end_with_their_client(deployed: Deployed) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1000, "stream": True, "temperature": 0}
    named = {"X-Session-ID": "stream"}
    with httpx.stream(
        "POST", f"{deployed.url}/v1/chat/completions", json={**body, "ignore_eos": True}, headers=named, timeout=60
    ) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        assert '"role":"assistant"' in next(lines)

    def cancelled() -> int:
        stats = httpx.get(f"{deployed.url}/v1/cache/stats", headers=named, timeout=60).json()
        return int(stats["engine"]["engine"]["finished"]["cancelled"])

    wait_for(lambda: cancelled() == 1, 30)
    whole = httpx.post(f"{deployed.url}/v1/chat/completions", json={**body, "max_tokens": 8}, headers=named, timeout=60)
    chunks = [json.loads(line[6:]) for line in whole.text.splitlines() if line.startswith("data: {")]
    assert len(chunks) > 2
    assert whole.text.rstrip().endswith("data: [DONE]")


@dataclass
class Asker:
    """A client that asks again and again, and notes what fails and when it had asked."""

    deployed: Deployed
    session: str
    failed: list[tuple[float, Exception]] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    stopped: bool = False

    def run(self) -> None:
        while not self.stopped:
            asked = time.monotonic()
            try:
                self.deployed.turn(self.session, "hello")
                self.answered.append(asked)
            except Exception as error:
                self.failed.append((asked, error))


@pytest.mark.long
def test_a_killed_replica_comes_back_and_finds_its_conversations(deployed: Deployed) -> None:
    homes = {session: deployed.home(session) for session in SESSIONS}
    texts = {session: (f"{session}. {STORY}", "It sails.", "What then?") for session in SESSIONS}
    before = {session: deployed.turn(session, *texts[session]) for session in SESSIONS}
    pids = deployed.pids
    assert sorted(pids) == ["replica-1", "replica-2"]

    askers = [Asker(deployed, session) for session in SESSIONS[:4]]
    threads = [threading.Thread(target=asker.run) for asker in askers]
    for thread in threads:
        thread.start()
    wait_for(lambda: all(asker.answered for asker in askers), 60)
    killed = time.monotonic()
    os.kill(pids["replica-1"], signal.SIGKILL)
    wait_for(lambda: deployed.pids.get("replica-1", pids["replica-1"]) != pids["replica-1"], 180)
    wait_for(lambda: len({deployed.home(session) for session in SESSIONS}) == 2, 60)
    for asker in askers:
        asker.stopped = True
    for thread in threads:
        thread.join()
    late = [(asked - killed, error) for asker in askers for asked, error in asker.failed if asked > killed]
    assert not late, "only requests that were open fail"
    assert max(Counter(asker.session for asker in askers for _ in asker.failed).values(), default=0) <= 1
    assert all(asker.answered[-1] > killed for asker in askers)

    now = {session: deployed.home(session) for session in SESSIONS}
    moved = {session for session in SESSIONS if now[session] != homes[session]}
    assert len({homes[session] for session in moved}) == 1, "the conversations of the other replica have stayed"
    assert moved == {session for session in SESSIONS if homes[session] in {homes[each] for each in moved}}
    assert deployed.pids.keys() == pids.keys(), "the same folder, and no other"
    for session in moved:
        after = deployed.turn(session, *texts[session])
        assert after.choices[0].message.content == before[session].choices[0].message.content
        cached = after.usage.prompt_tokens_details.cached_tokens
        assert cached >= before[session].usage.prompt_tokens_details.cached_tokens
        assert cached >= after.usage.prompt_tokens // 64 * 64 - 64
