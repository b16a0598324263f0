"""Hold an engine back between two steps."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from afterglow.engine.engine import Engine
from tests.waiting import wait_for


def hold_from(engine: Engine, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its step of this number on, counted from now, an engine goes no further before a caller asks something of its thread, as one
    that leaves does: its request has not ended when it leaves, however late that is.
    """
    runner, pressed, steps = engine.parts.runner, engine.parts.inbox.pressed, count()
    run = runner.run

    def held(step: Any) -> Any:
        if next(steps) >= number:
            wait_for(pressed, 60)
        return run(step)

    monkeypatch.setattr(runner, "run", held)
