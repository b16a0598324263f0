"""Pass actions from callers' threads to the engine's thread, and outputs back.

The engine's thread owns the plan, so each call that reads or changes the plan becomes an action here.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from afterglow.errors import RequestError, engine_dead, shutting_down
from afterglow.request import Output

T = TypeVar("T")


class Inbox:
    """Queue actions for the engine's thread. The inbox is open while that thread runs."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[tuple[Callable[[], object], threading.Event | None]] = queue.SimpleQueue()
        self._woken = threading.Event()
        self._open = False
        self._failed = False

    @property
    def is_open(self) -> bool:
        """Tell whether the engine's thread runs."""
        return self._open

    def open(self) -> None:
        """Note that the engine's thread begins."""
        self._open = True

    def close(self, failed: bool = False) -> None:
        """Note that the engine's thread ends, as it should or because it has `failed`: no further question is answered."""
        self._failed = failed
        self._open = False

    def ended(self) -> RequestError:
        """Make the error for callers whose engine has ended."""
        return engine_dead() if self._failed else shutting_down()

    def send(self, action: Callable[[], object]) -> None:
        """Have the engine's thread run `action`. Returns at once."""
        self._actions.put((action, None))

    def ask(self, question: Callable[[], T]) -> T:
        """Have the engine's thread run `question`, and return the result.

        Raises: RequestError, if the question raises it, and when the engine has stopped.
        """
        answers: list[T] = []
        refusals: list[RequestError] = []

        def action() -> None:
            try:
                answers.append(question())
            except RequestError as error:  # the caller's fault, which must not end the engine
                refusals.append(error)

        answered = threading.Event()
        self._actions.put((action, answered))
        while not answered.wait(0.1):
            if not self._open:
                raise self.ended()
        if refusals:
            raise refusals[0]
        if not answers:
            raise self.ended()
        return answers[0]

    def wake(self) -> None:
        """Wake the engine's thread, because a transfer has ended. Calls are merged, so that the queue cannot grow."""
        if not self._woken.is_set():
            self._woken.set()
            self.send(self._woken.clear)

    def pressed(self) -> bool:
        """Tell whether a caller waits for the engine's thread. Ended transfers do not count."""
        return self._actions.qsize() > self._woken.is_set()

    def take(self, timeout: float | None, answered: Callable[[], None]) -> None:
        """Run the actions that wait. If there are none, wait for one: up to `timeout` seconds, None for ever, 0 not at all.

        `answered` is called after each question, before its asker goes on.
        """
        while True:
            try:
                action, event = self._actions.get(timeout != 0, timeout)
            except queue.Empty:
                return
            try:
                action()
            finally:
                if event is not None:
                    answered()
                    event.set()
            timeout = 0


class OutputQueue:
    """Collect outputs from the engine's thread for one caller's thread. Call it as the sink of `Engine.submit`."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._outputs: queue.SimpleQueue[tuple[float, Output]] = queue.SimpleQueue()
        self._began = time.perf_counter()

    def __call__(self, output: Output) -> None:
        """Take in an output."""
        self._outputs.put((time.perf_counter() - self._began, output))

    def get(self) -> tuple[float, Output]:
        """Wait for the next output; return the seconds since this queue was made, and the output.

        Raises: RequestError, when the engine has stopped.
        """
        while True:
            try:
                return self._outputs.get(timeout=0.5)  # a wait without end could not be interrupted
            except queue.Empty:
                if not self._inbox.is_open:
                    raise self._inbox.ended() from None
