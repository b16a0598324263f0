"""`afterglow cluster`: processes that end with their parent and come back when they die, and the whole of it with vllm-router."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from afterglow.cli import child_process, cluster
from afterglow.cli.child_process import ChildProcess
from afterglow.errors import ConfigError
from afterglow.server.lifecycle.service import listen
from afterglow.server.server_config import ServerConfig
from tests.cli.kit import SMALL, inside
from tests.ports import own_port
from tests.waiting import wait_for

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def runs(pid: int) -> bool:
    """Is there a process of this id that has not ended?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------- one process


def test_a_process_that_dies_is_started_again_and_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(child_process, "time", SimpleNamespace(monotonic=lambda: now[0]))
    child = ChildProcess("it", SLEEP, os.environ)
    child.start()
    waits = []
    for restarts in range(1, 10):
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        wait_for(child.tend)
        assert (child.pid, child.exit_code) == (None, -signal.SIGKILL)
        waits.append(child.seconds_to_restart)
        now[0] += waits[-1] - 0.01
        assert not child.tend()
        assert child.pid is None
        now[0] += 0.02
        child.tend()
        assert child.restarts == restarts
        now[0] += 100 if restarts == 8 else 1
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 0.5]
    child.signal(signal.SIGTERM)
    assert child.wait(10)
    assert child.exit_code == -signal.SIGTERM
    now[0] += 1000
    assert not child.tend()
    assert child.pid is None, "it is not started again"


PARENT = """
import os, sys, time
from afterglow.cli.child_process import ChildProcess
child = ChildProcess("it", [sys.executable, "-c", "import time; time.sleep(60)"], os.environ)
child.start()
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's signal at a parent's death")
def test_a_process_ends_with_a_parent_that_was_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert runs(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not runs(child))


# ----------------------------------------------------------------------------------------------------------- ports


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a bound port is no server's")
def test_ports_of_a_cluster_are_given_to_no_other_process() -> None:
    with cluster.own_ports(3) as ports:
        assert len(set(ports)) == 3
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            for _ in range(2):  # a server is started again
                with contextlib.closing(listen(ServerConfig(port=port))) as server:
                    server.listen()
                    socket.create_connection(("127.0.0.1", port)).close()


# -------------------------------------------------------------------------------------------------------- mistakes


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def error(*args: str) -> str:
        done = inside("cluster", *args)
        assert done.returncode == 2
        return done.stderr

    assert "--replicas must be at least 1, got 0" in error("--replicas", "0")
    assert "--port of a cluster must lie between 1 and 65535, got 0" in error("--port", "0")
    assert "--kv-events cannot be the same for all servers" in error("--kv-events=tcp://127.0.0.1:5557")
    monkeypatch.setenv("AFTERGLOW_JOURNAL", str(tmp_path / "journal"))
    assert "AFTERGLOW_JOURNAL cannot be the same for all servers" in error()
    monkeypatch.delenv("AFTERGLOW_JOURNAL")
    file = tmp_path / "afterglow.yaml"
    file.write_text("serve: {record_trace: trace.jsonl}\n")
    assert f"serve.record_trace in {file} cannot be the same for all servers" in error("--config", str(file))
    monkeypatch.setattr(cluster, "find_router", lambda: "vllm-router")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on port {port} of 127.0.0.1: Address already in use" in error("--port", str(port))
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "vllm-router is not installed: pip install 'afterglow-llm[cluster]'" in error()


def test_the_router_may_listen_at_an_address_of_ipv6() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
            port = server.getsockname()[1]
            with pytest.raises(ConfigError, match="in use"):
                cluster.check_free("::1", port)
    except OSError:
        pytest.skip("no IPv6 here")
    cluster.check_free("::1", port)


# --------------------------------------------------------------------------------------------------- dead engines

STAND_IN = """
import signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
dead = Path(sys.argv[2])
dead.unlink(missing_ok=True)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if dead.exists() else 200)
        self.end_headers()
        self.wfile.write(b'{"error": {"code": "engine_dead"}}')
    def log_message(self, *args): ...
deaf = dead.with_suffix(".deaf")
if deaf.exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deaf.unlink()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SUPERVISOR = """
import os, sys
from pathlib import Path
from afterglow.cli import cluster
from afterglow.cli.child_process import ChildProcess
from afterglow.cli.cluster import Replica, Supervisor
from afterglow.cli.command_options import ReplicaOptions
cluster.END_SECONDS = 1.0
code, folder, ports = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
def child(name, port):
    return ChildProcess(name, [sys.executable, "-c", code, port, str(folder / name)], os.environ)
replica = Replica(child("server", ports[0]), f"http://127.0.0.1:{ports[0]}", folder)
Supervisor([replica], child("router", ports[1]), ReplicaOptions(port=int(ports[1]))).run()
"""


@pytest.mark.parametrize("deaf", [False, True])
def test_a_server_whose_engine_has_died_is_started_again(tmp_path: Path, deaf: bool) -> None:
    """With a proxy, which leads to none of a cluster's own addresses. `deaf`: it does not end when it is asked to."""
    if deaf:
        (tmp_path / "server.deaf").touch()
    command = [sys.executable, "-c", SUPERVISOR, STAND_IN, str(tmp_path), str(own_port()), str(own_port())]
    env = {**os.environ, "HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    limit = threading.Timer(120, process.kill)  # which ends a line that is waited for
    try:
        limit.start()
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("server: ")
        assert process.stdout.readline().startswith("router: ")
        (tmp_path / "server").touch()
        assert process.stderr.readline() == "server: its engine has died\n"
        assert process.stderr.readline().startswith(f"server has ended with exit code {-9 if deaf else -15}")
        wait_for(lambda: not (tmp_path / "server").exists(), 60)  # which the next one removes
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        limit.cancel()
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


# ----------------------------------------------------------------------------------------------- with vllm-router


class Running:
    """A cluster in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.url = process, f"http://127.0.0.1:{port}"
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        self.replicas = dict(re.search(r"(http://\S+), process (\d+)", line).groups() for line in lines[:2])  # type: ignore[union-attr]
        assert lines[2].startswith(f"router: {self.url}/v1"), lines

    def ask(self, session: str, *texts: str) -> httpx.Response:
        """Send a conversation of these texts, of the user and the assistant by turns."""
        messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]
        body = {"messages": messages, "max_tokens": 4, "temperature": 0}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers={"X-Session-ID": session}, timeout=60)

    def served(self) -> dict[str, int]:
        """Count the requests of each replica."""
        counts = {}
        for url in self.replicas:
            found = re.findall(r"^vllm:request_success_total\{.*\} (\S+)", httpx.get(f"{url}/metrics").text, re.M)
            counts[url] = round(sum(map(float, found)))
        return counts

    def replica_of(self, session: str) -> str:
        before = self.served()
        assert self.ask(session, "hello").status_code == 200
        (found,) = [url for url, count in self.served().items() if count > before[url]]
        return found

    @property
    def pids(self) -> list[int]:
        """List the cluster's own processes and those that it has started."""
        listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
        return [pid for pid, parent in pairs if parent == self.process.pid]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    yield from cluster_of(tmp_path)


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Running]:
    """A cluster whose servers share a store."""
    pytest.importorskip("obstore")
    yield from cluster_of(tmp_path, "--shared", (tmp_path / "shared").as_uri())


def cluster_of(tmp_path: Path, *options: str) -> Iterator[Running]:
    if shutil.which("vllm-router") is None and not Path(sys.executable).with_name("vllm-router").exists():
        pytest.skip("vllm-router is not installed")
    port = own_port()
    command = [sys.executable, "-m", "afterglow.cli", "cluster", "afterglow-small", *SMALL, "--port", str(port)]
    command += ["--cache-dir", str(tmp_path), "--log-level", "warning", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield Running(process, port)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.long
def test_a_conversation_stays_with_its_replica_and_outlives_it(running: Running) -> None:
    homes = {f"talk {number}": running.replica_of(f"talk {number}") for number in range(16)}
    assert set(homes.values()) == set(running.replicas)
    assert {name: running.replica_of(name) for name in homes} == homes
    name, home = next(iter(homes.items()))
    text = "The boat is blue and the house is red. " * 20
    first = running.ask(name, text).json()["usage"]
    again = running.ask(name, text).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens_details"]["cached_tokens"]

    os.kill(int(running.replicas[home]), signal.SIGKILL)
    assert [running.ask(each, "hello").status_code for each in homes] == [200] * len(homes)
    wait_for(lambda: _answers(home), 60)
    wait_for(lambda: running.replica_of(name) == home, 60)
    assert len(running.pids) == 3


def test_a_conversation_goes_on_at_another_replica_from_the_shared_store(sharing: Running) -> None:
    story = "The boat is blue and the house is red. " * 20
    home = sharing.replica_of("talk")
    first = sharing.ask("talk", story).json()
    turns = (story, first["choices"][0]["message"]["content"], "And then?")
    second = sharing.ask("talk", *turns).json()

    def count(name: str) -> float:
        found = re.findall(rf"^afterglow:shared_{name}\{{.*\}} (\S+)", httpx.get(f"{home}/metrics").text, re.M)
        return sum(map(float, found))

    wait_for(lambda: count("published_total") >= 2 and count("queue") == 0, 30)
    os.kill(int(sharing.replicas[home]), signal.SIGKILL)
    moved = sharing.ask("talk", *turns).json()
    assert moved["choices"][0]["message"]["content"] == second["choices"][0]["message"]["content"]
    usage = moved["usage"]
    assert usage["cached_tokens_details"]["shared"] >= first["usage"]["prompt_tokens"] // 64 * 64
    assert usage["prompt_tokens"] == second["usage"]["prompt_tokens"]


@pytest.mark.long
def test_requests_end_before_the_cluster_does_and_nothing_is_left(running: Running) -> None:
    pids = running.pids
    assert len(pids) == 3
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGINT)
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert running.process.wait(60) == 0
    assert not any(map(runs, pids))


@pytest.mark.long
def test_nothing_is_left_of_a_cluster_that_was_killed(running: Running) -> None:
    pids = running.pids
    running.process.kill()
    wait_for(lambda: not any(map(runs, pids)), 60)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").status_code == 200
    time.sleep(0.1)
    return False
