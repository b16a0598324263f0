"""A thread's priority is lowered where it has one, and that is a hint."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import pytest

from afterglow.thread_priority import NICENESS, give_way

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priorities of their own")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_a_thread(work: Callable[[], object]) -> object:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@linux
def test_a_refusal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    assert in_a_thread(lambda: give_way() or niceness()) == niceness()


def test_elsewhere_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a thread would be taken for that of a process."""
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "setpriority", lambda *call: calls.append(call))
    give_way()
    assert calls == []


@linux
def test_a_thread_of_low_priority_lowers_it_further() -> None:
    def twice() -> int:
        give_way()
        give_way()
        return niceness()

    assert in_a_thread(twice) == min(19, niceness() + 2 * NICENESS)
