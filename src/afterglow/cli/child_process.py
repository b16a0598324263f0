"""A process that ends with this one, even with a killed one, and is started again when it dies."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

BACK_OFF = (0.5, 30.0)  # seconds before the first restart, and at most; each failure in a row doubles them
STEADY = 60.0  # seconds of life after which a death counts as the first

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class ChildProcess:
    """One process, in a session of its own: Ctrl-C reaches this process alone, which then decides."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path | None = None) -> None:
        """`log`: the file for what it prints; None: as this process."""
        self.name, self.log = name, log
        self.exit_code: int | None = None  # of the last death
        self.restarts = 0
        self._command, self._env = list(command), dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._start_at: float | None = None
        self._wait = BACK_OFF[0]

    @property
    def pid(self) -> int | None:
        """Return its process id; None while it does not run."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start it. Only the main thread may: the process ends when the thread that started it does."""
        self._started, self._start_at = time.monotonic(), None
        out = open(self.log, "ab") if self.log is not None else None  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_end_with(os.getpid()),
            )
        finally:
            if out is not None:
                out.close()

    def tend(self) -> bool:
        """Take note of its death, and start it again when the time has come. Returns whether it has just died."""
        now = time.monotonic()
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process, self.exit_code = None, code
            if now - self._started > STEADY:
                self._wait = BACK_OFF[0]
            self._start_at = now + self._wait
            self._wait = min(2 * self._wait, BACK_OFF[1])
            return True
        if self._start_at is not None and now >= self._start_at:
            self.restarts += 1
            self.start()
        return False

    @property
    def seconds_to_restart(self) -> float:
        """Return how long it waits before it is started again."""
        return max(0.0, self._start_at - time.monotonic()) if self._start_at is not None else 0.0

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs, and do not start it again."""
        self._start_at = None
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, seconds: float) -> bool:
        """Wait for its end. Returns False if it still runs."""
        if self._process is not None:
            try:
                self.exit_code = self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
            self._process = None
        return True


def _end_with(parent: int) -> Callable[[], None] | None:
    """Make what a new process runs first: from then on the kernel asks it to end when its parent has died (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # found before the fork, which may not load anything

    def tie() -> None:
        prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:  # it has died in between
            os._exit(1)

    return tie
