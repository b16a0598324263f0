"""Faults at the boundary between the store and the operating system, by rule. Light to import: a server that is to be
harmed (`faulty_server`) and a process that is to be killed (`victim`) use it too.

Only calls on paths below one folder are looked at. SQLite makes its system calls in C: its statements stand for them.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import mmap
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from afterglow.store.extents import pieces

PATIENCE = 30.0  # seconds after which even a hanging call returns
TICK_S = 0.02


@dataclass(frozen=True)
class Call:
    """One call on its way; calling it carries it out. `path`: the file it is about; `args` of "sql": the statement."""

    name: str
    path: str
    args: tuple[Any, ...]
    real: Callable[..., Any]

    def __call__(self) -> Any:
        return self.real(*self.args)

    @property
    def extent(self) -> bool:
        """Is it about an extent's file, or one that is about to become one?"""
        folder, name = os.path.split(self.path)
        return (
            len(os.path.basename(folder)) == 2 and os.path.basename(os.path.dirname(folder)) == "extents" and bool(name)
        )


Act = Callable[[Call], Any]


@dataclass(eq=False)
class Rule:
    """What happens to some calls. The first `skip` that match pass, and those after `limit` hits."""

    names: Sequence[str]
    act: Act
    match: Callable[[Call], bool] = lambda call: True
    skip: int = 0
    limit: int = 1 << 30
    hits: int = 0
    phases: list[list[str]] = field(default_factory=list)  # the phases under way, at each hit


class Syscalls:
    """Stands between this process and the operating system while it is entered."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._rules: list[Rule] = []
        self._paths: dict[int, str] = {}
        self._undo: list[tuple[Any, str, Any]] = []
        self._lock = threading.Lock()
        self.under_way: Callable[[], list[str]] = list

    def add(self, rule: Rule) -> Rule:
        self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """From now on nothing goes wrong."""
        self._rules = []

    def __enter__(self) -> Syscalls:
        for name in ("rename", "replace", "unlink", "scandir", "mkdir", "stat", "lstat", "listdir"):
            self._wrap(os, name, self._by_path)
        for name in ("preadv", "pwritev", "pwrite"):
            self._wrap(os, name, self._by_descriptor)
        self._wrap(pieces, "preadv", self._by_descriptor)  # the compiled kernels' own
        self._wrap(os, "open", self._opening)
        self._wrap(pieces, "open_as_expected", self._opening)
        self._wrap(os, "close", self._closing)
        self._wrap(builtins, "open", self._by_path)
        self._wrap(io, "open", self._by_path)  # what pathlib calls
        self._wrap(sqlite3, "connect", self._connecting)
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        for module, name, real in reversed(self._undo):
            setattr(module, name, real)
        self._undo = []

    def _wrap(self, module: Any, name: str, how: Callable[..., Any]) -> None:
        real = getattr(module, name)

        def wrapper(*args: Any, **more: Any) -> Any:
            return how(name, functools.partial(real, **more), args)

        self._undo.append((module, name, real))
        setattr(module, name, wrapper)

    def _by_path(self, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        path = args[0] if args else "."
        if isinstance(path, int) or self._root not in (text := os.fsdecode(path)):
            return real(*args)
        if name == "open":
            name = "fopen"
        return self._happen(Call(name, text, args, real))

    def _by_descriptor(self, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        path = self._paths.get(args[0])
        return real(*args) if path is None else self._happen(Call(name, path, args, real))

    def _opening(self, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        path = os.fsdecode(args[0])
        if self._root not in path:
            return real(*args)

        def opened(*given: Any) -> int:
            descriptor = int(real(*given))
            if descriptor >= 0:
                self._paths[descriptor] = path
            return descriptor

        return self._happen(Call("open", path, args, opened))

    def _closing(self, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        path = self._paths.pop(args[0], None)
        return real(*args) if path is None else self._happen(Call(name, path, args, real))

    def _connecting(self, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        path = str(args[0])
        if self._root not in path:
            return real(*args)
        happen = self._happen

        class Connection(sqlite3.Connection):
            def execute(self, *given: Any) -> sqlite3.Cursor:
                found: sqlite3.Cursor = happen(Call("sql", path, given, super().execute))
                return found

            def executemany(self, *given: Any) -> sqlite3.Cursor:
                found: sqlite3.Cursor = happen(Call("sql", path, given, super().executemany))
                return found

        return functools.partial(real, factory=Connection)(*args)

    def _happen(self, call: Call) -> Any:
        for rule in self._rules:
            if call.name not in rule.names or not rule.match(call):
                continue
            with self._lock:
                if rule.skip:
                    rule.skip -= 1
                    continue
                if rule.hits >= rule.limit:
                    continue
                rule.hits += 1
                rule.phases.append(self.under_way())
            return rule.act(call)
        return call()


ALL = (
    *("rename", "replace", "unlink", "scandir", "mkdir", "stat", "lstat", "listdir", "open", "fopen"),
    *("preadv", "pwritev", "pwrite", "sql"),
)


# ------------------------------------------------------------------------------------------------ what happens


class LateClock:
    """Says the time of the store's time-outs in a scene. It goes on only while a call is late on purpose, so that none is given up that
    is late because the machine is busy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 1000.0
        self._late = 0  # calls

    def monotonic(self) -> float:
        return self._now

    def wait(self, seconds: float, gate: threading.Event | None = None) -> None:
        """Let so many seconds pass, or fewer, if the gate opens."""
        gate = gate or threading.Event()
        with self._lock:
            self._late += 1
            end = self._now + seconds
        while self._now < end and not gate.wait(TICK_S):
            with self._lock:
                self._now += TICK_S / self._late  # side by side, calls are late for no longer than one
        with self._lock:
            self._late -= 1


CLOCK = LateClock()


def error(number: int) -> Act:
    """The call fails. SQLite's statements fail with the words that it has for this."""
    said = {errno.ENOSPC: "database or disk is full", errno.EIO: "disk I/O error"}

    def act(call: Call) -> Any:
        if call.name == "sql":
            raise sqlite3.OperationalError(said[number])
        raise OSError(number, os.strerror(number), call.path)

    return act


def slow(seconds: float) -> Act:
    def act(call: Call) -> Any:
        time.sleep(seconds)
        return call()

    return act


def late(seconds: float) -> Act:
    """The call is slow by the clock of scenes."""

    def act(call: Call) -> Any:
        CLOCK.wait(seconds)
        return call()

    return act


def hang(gate: threading.Event) -> Act:
    """The call does not return before the gate opens; then it does what it was to do. By the clock of scenes."""

    def act(call: Call) -> Any:
        CLOCK.wait(PATIENCE, gate)
        return call()

    return act


def kill_before(_: Call) -> Any:
    die()


def kill_after(call: Call) -> Any:
    call()
    die()


def kill_half_way(call: Call) -> Any:
    """Of a write, one page arrives."""
    descriptor, buffers, offset = call.args
    call.real(descriptor, [buffers[0].reshape(-1)[:4096]], offset)
    die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(PATIENCE)


def flip_on_the_way(where: Callable[[bytes], int]) -> Act:
    """One bit changes between memory and disk, at the offset of the file that `where(head)` tells."""

    def act(call: Call) -> Any:
        descriptor, buffers, offset = call.args
        whole = np.concatenate([np.asarray(buffer).reshape(-1) for buffer in buffers])
        copy = np.frombuffer(mmap.mmap(-1, whole.nbytes), np.uint8)  # page-aligned, as direct I/O wants it
        copy[:] = whole
        copy[where(bytes(whole[:4096])) - offset] ^= 0x10
        return call.real(descriptor, [copy], offset)

    return act


def cut_before(call: Call) -> Any:
    """A file loses its second half just before it gets its name."""
    os.truncate(call.path, os.path.getsize(call.path) // 8192 * 4096)
    return call()
