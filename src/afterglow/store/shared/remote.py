"""Calls of an object store that end: each by its deadline, and none while the store is known not to answer.

A call of a store over a network, or of a network's file system, may hang for as long as it likes, and cannot be ended. So
each has a thread for itself, which is left behind when the call is late. After some failures in a row the store is left alone for a while.
"""

from __future__ import annotations

import errno
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

from afterglow.errors import RefusedError, StoreError
from afterglow.store.shared.objects import Closeable, Listed, Objects

log = logging.getLogger("afterglow.store")
T = TypeVar("T")

MAX_FAILURES: Final = 3  # in a row, before the store is left alone
REST_S: Final = 30.0  # for so long
NO_BUCKET: Final = (
    "NoSuchBucket",
    "ContainerNotFound",
)  # then all objects are missing, which says nothing of any of them
KEPT_THREADS: Final = 8  # idle threads
MAX_ASIDE: Final = 32  # calls that are not the store's, at a time: more hang
MAX_HUNG: Final = 8  # calls that do not come back, before no more are made


class KeptThreads:
    """As many threads as there are things to do at the same time, kept for what comes next: to start one takes its time while others
    compute. They are daemons: what hangs keeps no process alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Callable[[], object] | None]] = []
        self._closed = False

    @property
    def idle(self) -> int:
        """Count the threads that wait for something to do."""
        with self._lock:
            return len(self._idle)

    def run(self, work: Callable[[], object]) -> None:
        """Have a thread do `work`, which raises nothing. Returns at once."""
        with self._lock:
            todo = self._idle.pop() if self._idle else None
        if todo is None:
            todo = SimpleQueue()
            threading.Thread(target=self._work, args=(todo,), name=self._name, daemon=True).start()
        todo.put(work)

    def close(self) -> None:
        """End the threads that are idle, and the others when they are."""
        with self._lock:
            self._closed = True
            for todo in self._idle:
                todo.put(None)
            self._idle.clear()

    def _work(self, todo: SimpleQueue[Callable[[], object] | None]) -> None:
        while (work := todo.get()) is not None:
            work()
            del work  # and what it holds
            with self._lock:
                if self._closed or len(self._idle) >= KEPT_THREADS:
                    return
                self._idle.append(todo)


class _Answer(Generic[T]):
    def __init__(self) -> None:
        self.there = threading.Event()
        self.late = False
        self.value: list[T] = []
        self.error: BaseException | None = None


class Remote:
    """An object store, opened by its first call. May be used from any thread."""

    def __init__(self, open_objects: Callable[[], Objects], clock: Callable[[], float] = time.monotonic) -> None:
        self._open = open_objects
        self._clock = clock
        self._lock = threading.Lock()
        self._threads = KeptThreads("afterglow-shared-call")
        self.opened: Objects | None = None  # the store, if it has been opened
        self._failures = 0
        self._told = False  # was it logged that the store fails?
        self._rests_until = 0.0
        self.hung = 0  # calls that have not come back by their deadline
        self._aside = 0  # calls that are not the store's
        self._closed = False

    @property
    def rests(self) -> bool:
        """Is the store left alone now?"""
        with self._lock:
            return self._closed or self.hung >= MAX_HUNG or self._clock() < self._rests_until

    def aside(self, work: Callable[[], T], seconds: float) -> T | None:
        """Return what `work` returns, if it does within `seconds`; else None. It is no call of the store, and says nothing about it."""
        with self._lock:
            if self._aside >= MAX_ASIDE:
                return None
            self._aside += 1
        answer: _Answer[T] = _Answer()

        def run() -> None:
            self._run(lambda _: work(), answer)
            with self._lock:
                self._aside -= 1

        self._threads.run(run)
        return answer.value[0] if answer.there.wait(max(0.0, seconds)) and answer.error is None else None

    def close(self) -> None:
        """Refuse all further calls; close what was opened, if that can be closed."""
        with self._lock:
            self._closed = True
            objects = self.opened
        if isinstance(objects, Closeable):
            objects.close()
        self._threads.close()

    def warm(self, work: Callable[[Objects], object]) -> None:
        """Open the store and do `work` before a request waits for it. What goes wrong is not told: the next call finds it too."""
        self._threads.run(partial(self._run, work, _Answer()))

    def call(self, what: str, work: Callable[[Objects], T], seconds: float) -> T:
        """Return what `work` returns, if it does within `seconds`. `what` names the call in errors.

        Raises:
            StoreError: it does not, or the store is left alone (`RefusedError`).
        """
        if self.rests:
            raise RefusedError(f"{what}: the shared store is left alone, since it has failed")
        answer: _Answer[T] = _Answer()
        self._threads.run(partial(self._run, work, answer))
        if not answer.there.wait(max(0.0, seconds)):
            with self._lock:
                if not answer.there.is_set():
                    answer.late = True
                    self.hung += 1
            if answer.late:
                reason = f"{what}: no answer for {seconds:.2f} s"
                self._failed(reason)
                raise StoreError(reason) from TimeoutError()
        if answer.error is None:
            self._answered()
            return answer.value[0]
        cause, reason = _cause(answer.error), f"{what}: {_reason(answer.error)}"
        if isinstance(cause, FileNotFoundError):
            self._answered()
        else:
            self._failed(reason)
        raise StoreError(reason) from cause

    def list(self, what: str, folder: str, seconds: float) -> Iterator[list[Listed]]:
        """Yield all objects below a folder, some at a time; each step has `seconds`, however many there are.

        Raises:
            StoreError: as `call`.
        """
        return self.steps(what, lambda objects: objects.list(folder), seconds)

    def steps(self, what: str, work: Callable[[Objects], Iterator[T]], seconds: float) -> Iterator[T]:
        """Yield what `work` yields; each step has `seconds`. Raises: StoreError, as `call`."""

        def begin(objects: Objects) -> tuple[Iterator[T], list[T]]:
            steps = work(objects)
            return steps, [*islice(steps, 1)]  # one call: one that only makes the iterator never fails

        steps, some = self.call(what, begin, seconds)
        while some:
            yield from some
            some = self.call(what, lambda _: [*islice(steps, 1)], seconds)

    def _run(self, work: Callable[[Objects], T], answer: _Answer[T]) -> None:
        try:
            with self._lock:
                objects = self.opened
            if objects is None:
                objects = self._open()
                with self._lock:
                    self.opened = objects
            answer.value.append(work(objects))
        except BaseException as error:
            answer.error = error
        finally:
            with self._lock:
                answer.there.set()
                self.hung -= answer.late

    def _answered(self) -> None:
        with self._lock:
            self._failures = 0
            self._told = False

    def _failed(self, reason: str) -> None:
        """Count a failure. The reason why the store is left alone is logged once, until it has answered again."""
        with self._lock:
            self._failures += 1
            if self._failures < MAX_FAILURES:
                return
            self._failures = 0
            self._rests_until = self._clock() + REST_S
            told, self._told = self._told, True
        if not told:
            log.warning("the shared store fails, and is left alone for %g s at a time: %s", REST_S, reason)


def _cause(error: BaseException) -> BaseException:
    """Turn an error of a store into one whose kind is known (see `faults.kind_of`)."""
    text = str(error)
    if any(f"<Code>{code}</Code>" in text for code in NO_BUCKET):
        return OSError(errno.EIO, "the shared store has no such bucket")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "missing")
    if "status code: 401" in text or "status code: 403" in text:
        return PermissionError(errno.EACCES, "the shared store's credentials")
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
        if f"os error {number})" in text:
            return OSError(number, "the shared store")
    return error if isinstance(error, Exception) else StoreError(repr(error))


def _reason(error: BaseException) -> str:
    """Shorten an error to its reason, and say what mends it where that is known: stores' errors begin with the whole URL, and end with pages."""
    text = str(error) or repr(error)
    first = text.splitlines()[0]
    reason = first.rsplit(" - ", 1)[-1].partition("<?xml")[0].strip(": ")
    asked = re.search(r"token request: .*? https?://([^/ ]+)/", first) or re.search(
        r" https?://([^/ ]+)/latest/api/token ", first
    )
    if asked is not None:  # another server than the store's
        reason = f"asking {asked[1]} for credentials: {reason}"
    if "source: BadScheme" in text:
        reason = "an http:// endpoint needs AWS_ALLOW_HTTP, GOOGLE_ALLOW_HTTP or AZURE_ALLOW_HTTP=true"
    said = re.search("<Message>([^<]+)</Message>", text) or re.search(r'\b(?:message|error): "([^"]+)"', text)
    return (f"{reason}: {' '.join(said[1].split())}" if said is not None else reason)[:200]
