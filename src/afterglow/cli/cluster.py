"""`afterglow cluster`: several servers on one machine, and a router that sends each conversation to one of them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from afterglow.cli.child_process import ChildProcess
from afterglow.cli.command_options import ReplicaOptions
from afterglow.cli.option_sources import OptionSource
from afterglow.config import default_cache_dir
from afterglow.errors import ConfigError, UserError
from afterglow.library.threads import physical_cores

ROUTER = "vllm-router"
POLL = 0.2  # seconds
HEALTH_SECONDS = 2.0  # between two looks at whether each server's engine lives
END_SECONDS = 10.0  # for the end of a server whose engine has died, before it is killed
ROUTER_SECONDS = 5.0  # for the router's end, once no replica answers any more
# What names one address or file; and the router speaks plain HTTP with servers.
ONE_EACH = ("--kv-events", "--kv-events-replay", "--journal", "--record-trace", "--ssl-certfile")


@dataclass(frozen=True)
class Replica:
    """A server, and where it listens."""

    process: ChildProcess
    url: str
    folder: Path


def cluster(options: ReplicaOptions, serve_args: Sequence[str], sources: Mapping[str, OptionSource]) -> int:
    """Run servers and a router until a signal. `serve_args`: for every server. `sources`: the options that servers will find in
    variables and in a file. Returns the exit code.

    Raises: ConfigError, for what cannot be shared, a router that is not installed, and an occupied port; UserError, where a
    server ends before it is ready.
    """
    for name in ONE_EACH:
        source = sources.get(name[2:].replace("-", "_"))
        typed = any(arg == name or arg.startswith(f"{name}=") for arg in serve_args)
        if typed or source is not None:
            where = name if source is None or typed else source.where
            raise ConfigError(
                f"{where} cannot be the same for all servers of a cluster; leave it out, or start them apart"
            )
    if "threads" not in sources:
        serve_args = ["--threads", str(max(1, physical_cores() // options.replicas)), *serve_args]
    router = find_router()
    check_free(options.host, options.port)
    folder = options.cache_dir if options.cache_dir is not None else default_cache_dir() / "replicas"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--cache-dir {folder} cannot be used: {error.strerror}") from None
    with own_ports(options.replicas + 1) as (*ports, metrics):
        replicas = [make_replica(number, port, folder, serve_args) for number, port in enumerate(ports, 1)]
        return Supervisor(replicas, make_router(router, options, replicas, metrics, folder), options).run()


def find_router() -> str:
    """Find the router's command: of this environment, else on the PATH. Raises: ConfigError."""
    beside = Path(sys.executable).with_name(ROUTER)
    found = str(beside) if beside.exists() else shutil.which(ROUTER)
    if found is None:
        raise ConfigError(f"{ROUTER} is not installed: pip install 'afterglow-llm[cluster]'")
    return found


def check_free(host: str, port: int) -> None:
    """Find out whether a port can be listened on. Raises: ConfigError."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot listen on port {port} of {host}: {error.strerror}; stop the other server or choose another --port"
        ) from None


@contextmanager
def own_ports(count: int) -> Iterator[list[int]]:
    """Find so many free ports of 127.0.0.1. They are bound meanwhile, so that the kernel gives them to no other process that asks for any,
    and not listened at, so that a server that names one may have it, again after its death (Linux)."""
    with ExitStack() as bound:
        ports = []
        for _ in range(count):
            held = bound.enter_context(socket.socket())
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            ports.append(int(held.getsockname()[1]))
        if not sys.platform.startswith("linux"):  # where no other socket may be bound there
            bound.close()
        yield ports


def make_replica(number: int, port: int, folder: Path, serve_args: Sequence[str]) -> Replica:
    """Make the server of a number, with a folder of its own."""
    own = folder / f"replica-{number}"
    command = [sys.executable, "-m", "afterglow.cli", "serve", *serve_args]
    command += ["--host", "127.0.0.1", "--port", str(port), "--cache-dir", str(own)]
    return Replica(ChildProcess(f"replica {number}", command, os.environ), f"http://127.0.0.1:{port}", own)


def make_router(
    path: str, options: ReplicaOptions, replicas: Sequence[Replica], metrics: int, folder: Path
) -> ChildProcess:
    """Make the router. A replica that fails is left out at once, and asked again after a second."""
    command = [
        path, "--policy", "consistent_hash", "--host", options.host, "--port", str(options.port),
        "--worker-urls", *(replica.url for replica in replicas),
        "--worker-startup-check-interval", "1", "--health-check-interval-secs", "1",
        "--health-failure-threshold", "1", "--health-success-threshold", "1",
        "--cb-failure-threshold", "2", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "1",
        "--cors-allowed-origins", url_of(options),
        "--prometheus-port", str(metrics), "--log-level", "warning",
    ]  # fmt: skip
    env = {"RUST_LOG": "warn", **os.environ}  # otherwise it writes several lines for each request
    direct = ",".join(filter(None, (env.get("no_proxy") or env.get("NO_PROXY"), "127.0.0.1")))
    env |= {"no_proxy": direct, "NO_PROXY": direct}  # its servers are reached by no proxy
    return ChildProcess("router", command, env, folder / "router.log")


def url_of(options: ReplicaOptions) -> str:
    """Return the router's address."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http://{host}:{options.port}"


class Supervisor:
    """Servers and router while they run."""

    def __init__(self, replicas: Sequence[Replica], router: ChildProcess, options: ReplicaOptions) -> None:
        self._replicas, self._router = replicas, router
        self._url = url_of(options)
        self._client = httpx.Client(trust_env=False, timeout=1)  # no proxy leads to these
        self._look_at = 0.0
        self._ending: dict[int, float] = {}  # servers whose engines have died, by process: since when
        self._signals = 0
        self._signalled = threading.Event()

    def run(self) -> int:
        """Start everything, watch over it, and end it after a signal. Raises: UserError."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._start()
            while not self._signalled.wait(POLL):
                for child in self._children:
                    if child.tend():
                        print(
                            f"{child.name} has ended with exit code {child.exit_code}; it is started again in "
                            f"{child.seconds_to_restart:.1f} s",
                            file=sys.stderr,
                        )
                self._end_dead_engines()
            return 0
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def _children(self) -> list[ChildProcess]:
        return [*(replica.process for replica in self._replicas), self._router]

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1
        self._signalled.set()

    def _end_dead_engines(self) -> None:
        """End the servers whose engine has died: they would answer nothing but errors, and are started again."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + HEALTH_SECONDS
        for replica in self._replicas:
            pid = replica.process.pid
            if pid is None or self._signalled.is_set():
                continue
            if pid in self._ending:
                if time.monotonic() - self._ending[pid] > END_SECONDS:
                    replica.process.signal(signal.SIGKILL)
                continue
            answer = self._health(replica.url)
            if answer is not None and answer.status_code == 503 and "engine_dead" in answer.text:
                print(f"{replica.process.name}: its engine has died", file=sys.stderr)
                self._ending[pid] = time.monotonic()
                replica.process.signal(signal.SIGTERM)

    def _health(self, url: str) -> httpx.Response | None:
        """Ask a process for its health; None, where it does not answer."""
        try:
            return self._client.get(f"{url}/health")
        except httpx.TransportError:
            return None

    def _start(self) -> None:
        """Start servers, then the router, and wait until each is healthy. Raises: UserError."""
        for replica in self._replicas:
            replica.process.start()
        for replica in self._replicas:
            if self._wait_for(replica.process, replica.url):
                where = f"{replica.url}, process {replica.process.pid}, cache in {replica.folder}"
                print(f"{replica.process.name}: {where}", flush=True)
        if not self._signalled.is_set():
            self._router.start()
            if self._wait_for(self._router, self._url):
                print(f"router: {self._url}/v1, by the header X-Session-ID", flush=True)

    def _wait_for(self, child: ChildProcess, url: str) -> bool:
        """Wait until a process answers that it is healthy. Returns False after a signal. Raises: UserError, where it ends."""
        while not self._signalled.wait(POLL):
            for each in self._children:
                if each.tend():
                    said = f"; see {each.log}" if each.log is not None else ""
                    raise UserError(
                        f"{each.name} has ended with exit code {each.exit_code} before all were ready{said}"
                    )
            answer = self._health(url)
            if answer is not None and answer.status_code == 200:
                return True
            self._end_dead_engines()
        return False

    def _end(self) -> None:
        """Let the servers end what they are at; then the router, through which those answers go."""
        servers = [replica.process for replica in self._replicas]
        for child in servers:
            child.signal(signal.SIGTERM)
        heeded = max(1, self._signals)
        while self._any_runs(servers):
            if self._signals > heeded:  # a server that gets a second one ends at once
                heeded = self._signals
                for child in servers:
                    child.signal(signal.SIGTERM if heeded == 2 else signal.SIGKILL)
        self._router.signal(signal.SIGTERM)
        if not self._router.wait(ROUTER_SECONDS):
            self._router.signal(signal.SIGKILL)
            self._router.wait(ROUTER_SECONDS)

    def _any_runs(self, children: Sequence[ChildProcess]) -> bool:
        """Wait a moment for the end of processes. Does one still run?"""
        ended = [child.wait(POLL / len(children)) for child in children]
        return not all(ended)
