"""Child processes that never outlive the benchmark: their log, their processor time, their end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from afterglow.errors import AfterglowError

_PR_SET_PDEATHSIG = 1
_TICKS = os.sysconf("SC_CLK_TCK")
PATIENCE = 10.0  # seconds between asking a process to end and ending it
THREADS = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_")  # how variables begin that say how libraries use threads
TIDYING = 3.0  # seconds for what it leaves behind: Python removes shared memory in a process of its own


class PeerError(AfterglowError):
    """A peer that does not start, dies, answers wrongly or not at all; says where its log is, and its last lines."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Child:
    """A process with a session of its own, so that it and all its children end together. Its stderr goes to `log`.

    It runs on `cores` only. It does not inherit variables that say how threads work and wait: engines would be measured with them.
    When the benchmark itself is killed, the kernel ends the child.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        cores: Sequence[int] = (),
        pipe: bool = False,
        folder: Path | None = None,
    ) -> None:
        """Start the program in `folder`. `pipe`: talk to it over stdin and stdout; otherwise stdout goes to the log too.

        Raises: PeerError if the program is not there.
        """
        self.log = log
        self.name = log.stem
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as writing:
            try:
                self.process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.PIPE if pipe else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if pipe else writing,
                    stderr=writing,
                    cwd=folder,
                    env={
                        **{name: value for name, value in os.environ.items() if not name.startswith(THREADS)},
                        **(environment or {}),
                    },
                    start_new_session=True,
                    preexec_fn=_prepared(os.getpid(), tuple(cores)),
                )
            except OSError as error:
                raise PeerError(f"{self.name}: {command[0]} cannot be started: {error}") from None

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return self.process.stdin, self.process.stdout

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def cpu_seconds(self) -> float:
        """Processor time of the process and of all that it has started and that still run."""
        return sum(_cpu_seconds(pid) for pid in _session(self.process.pid))

    def stop(self) -> None:
        """End the whole session: politely, and after `PATIENCE` seconds not politely. Idempotent."""
        if self.running:
            _signal(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
            until = time.monotonic() + TIDYING
            while not self.running and _session(self.process.pid) and time.monotonic() < until:
                time.sleep(0.02)
        _signal(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pid in _session(self.process.pid):  # processes that left the group and not the session
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def failed(self, what: str) -> PeerError:
        """An error with the last lines that the process has said."""
        status = self.process.poll()
        ended = "" if status is None else f" (it ended with status {status})"
        return PeerError(f"{self.name} {what}{ended}; log {self.log}:\n{self._tail()}")

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Ask again and again. Raises: PeerError if it ends first, or after so many seconds."""
        until = time.monotonic() + seconds
        while not ready():
            if not self.running:
                raise self.failed("ended before it was ready")
            if time.monotonic() > until:
                raise self.failed(f"was not ready after {seconds:g} s")
            time.sleep(0.1)

    def _tail(self, lines: int = 15) -> str:
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"  (no log: {error})"
        return "\n".join(f"  {line[:300]}" for line in text.splitlines()[-lines:])


def _prepared(parent: int, cores: tuple[int, ...]) -> Callable[[], None]:
    """What the child does between fork and exec."""
    libc: Any = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        with contextlib.suppress(OSError):  # short of memory, the system shall end these and nothing else
            Path("/proc/self/oom_score_adj").write_text("800")
        if hasattr(libc, "prctl"):
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it has died in between
                os._exit(1)

    return prepare


def _signal(session: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, number)


def _session(leader: int) -> list[int]:
    """All processes of a session (proc(5): the sixth field of `stat`); [] where there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields is not None and int(fields[3]) == leader:
            found.append(int(entry.name))
    return found


def _cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    return 0.0 if fields is None else (int(fields[11]) + int(fields[12])) / _TICKS


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third one on (the second, the name, may contain anything)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that all children are stopped."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
