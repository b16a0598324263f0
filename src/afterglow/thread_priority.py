"""Priorities of threads, as the operating system knows them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Final

NICENESS: Final = 10  # a core that both want goes to other threads for about nine tenths of the time


def give_way() -> None:
    """Lower the priority of this thread and of the threads that it will start, on Linux; elsewhere a thread has none of its
    own. It cannot be raised again.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it is a hint
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
