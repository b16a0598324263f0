"""Two engines whose lines to the store and to the directory are bad: late, broken off, silent, cut. `CHAOS_SEED=N` draws the same faults.

`tests/faults/test_shared_chaos.py` does that to whole servers, and kills them.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afterglow.store.shared import directory, shared_store
from tests.engine.conftest import Handle
from tests.engine.store_servers import SERVERS, store_server
from tests.engine.test_shared_s3 import BUCKET, rows_of
from tests.faults import bad_line as lines
from tests.faults.bad_line import BadLine, bad_line
from tests.store.redis_server import RedisServer, found_binary

pytest.importorskip("obstore")
OFTEN = {"sent again": 8, "reset": 16, "dead": 40}
SHORTER = (  # what fails is asked again soon, so that faults are met again and again
    ("remote", "REST_S", 0.1),
    ("directory", "REST_S", 0.1),
    ("fetcher", "READ_S", 0.5),
    ("extent_publisher", "PUT_S", 0.5),
    ("shared_store", "CLOSE_S", 0.2),
    ("shared_store", "LOOKUP_S", shared_store.LOOKUP_S),  # as it is
    ("directory", "CALL_S", directory.CALL_S),
    ("directory", "LATE_S", directory.LATE_S),
)
LONGER = (
    ("shared_store", "LOOKUP_S", 20.0),
    ("directory", "CALL_S", 5.0),
    ("directory", "LATE_S", 50.0),
)  # while the lines are good
SEED = int(os.environ.get("CHAOS_SEED", random.getrandbits(32)))


@pytest.fixture(params=SERVERS)
def store_line(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[BadLine]:
    """The line to a store, which the environment leads to."""
    with store_server(request.param) as server:
        server.make(BUCKET)
        with bad_line(server.entry, SEED) as line:
            for name, value in server.environment_by(line.port).items():
                monkeypatch.setenv(name, value)
            yield line


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer | None]:
    """A directory's server; None: there is none here."""
    server = RedisServer(tmp_path) if found_binary() is not None else None
    yield server
    if server is not None:
        server.kill()


def converse(engines: list[Handle], seed: int, trouble: Callable[[], object], rest_s: float) -> int:
    """Hold a conversation that changes its engine every turn, each answer compared. Returns the rows that came from the store. `rest_s`: how
    long what is published after a turn is waited for at most.
    """
    text, found = rows_of(seed, 130), 0
    for turn in range(6):
        handle = engines[turn % 2]
        if turn == 3:
            trouble()
        done = handle.ask(text, max_tokens=8)
        assert done.tokens == handle.ask(text, max_tokens=8, reuse=False).tokens, (seed, turn)
        found += done.cached.shared
        handle.engine.settle()
        assert handle.engine.parts.store.shared is not None
        handle.engine.parts.store.shared.rest(rest_s)
        text = [*text, *done.tokens, *rows_of(seed + turn + 1, 40)]
    return found


def test_conversations_over_bad_lines(
    start: Callable[..., Handle],
    model_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    store_line: BadLine,
    redis: RedisServer | None,
) -> None:
    print(f"CHAOS_SEED={SEED}")
    monkeypatch.setattr(lines, "LINE_FAULTS", {})
    for module, name, seconds in LONGER:
        monkeypatch.setattr(f"afterglow.store.shared.{module}.{name}", seconds)
    with contextlib.ExitStack() as opened:
        options = {"shared": f"{request.node.callspec.params['store_line']}://{BUCKET}/kv"}
        if redis is not None:
            line = opened.enter_context(bad_line(redis.port, SEED))
            options["shared_directory"] = f"redis://127.0.0.1:{line.port}/0"
        engines = [start(model_of("llama"), tmp_path / name, **options) for name in "ab"]

        def trouble() -> None:
            store_line.cut(0.5)
            if redis is not None:
                redis.kill()
                redis.start()

        assert converse(engines, 0, lambda: None, 20.0) > 0, "what follows would show nothing"
        monkeypatch.setattr(lines, "LINE_FAULTS", OFTEN)
        for module, name, seconds in SHORTER:
            monkeypatch.setattr(f"afterglow.store.shared.{module}.{name}", seconds)
        converse(engines, 100, trouble, 1.0)
        assert store_line.faults["cut"] == 1
        assert sum(store_line.faults.values()) > 3
        for handle in engines:
            handle.engine.close()
