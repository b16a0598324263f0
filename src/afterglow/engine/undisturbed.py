"""Millions of objects at once, without the garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Switch garbage collection off while millions of objects are made that stay.

    Afterwards these objects count as old, so that the collector does not look at them soon; not where a process has frozen the objects
    that it began with, which would thaw. Has no effect where garbage collection is off anyway.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # which moves all objects to the oldest generation
        gc.enable()
