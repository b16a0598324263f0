"""Garbage collection while many objects are made."""

from __future__ import annotations

import gc

from afterglow.engine.undisturbed import undisturbed


def test_frozen_objects_stay_frozen() -> None:
    """A server freezes what it began with, and each recording of a step runs without the collector."""
    held: list[object] = []
    gc.freeze()
    try:
        with undisturbed():
            assert not gc.isenabled()
        assert gc.isenabled()
        # The collector's own list leaves frozen objects out. Their count is no measure: others die meanwhile.
        assert not any(one is held for one in gc.get_objects())
    finally:
        gc.unfreeze()


def test_new_objects_count_as_old() -> None:
    gc.collect()
    with undisturbed():
        made = [[number] for number in range(5000)]
    assert gc.get_freeze_count() == 0
    assert len(gc.get_objects(generation=2)) >= len(made)
