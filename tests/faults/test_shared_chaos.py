"""kill -9 of servers over one store and one directory, both with faults of their own and on bad lines, under conversations that change
their server at every turn.

Every answer, in the short form some of them, is computed again afterwards by a server that reuses nothing. `CHAOS_SEED=N` asks the same,
and draws the same faults; when they come the system decides.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from afterglow.model.loader import load_model
from afterglow.text import Tokenizer
from tests.faults.bad_line import LINE_FAULTS, BadLine, bad_line
from tests.faults.bad_store import BUCKET, STORE_FAULTS, bad_store
from tests.faults.chaos import Answer, Server
from tests.faults.shared_chaos import SharedChaos
from tests.faults.test_chaos import BUNDLED, Exact, Verifier
from tests.store.redis_server import RedisServer, found_binary

pytest.importorskip("obstore")
pytestmark = pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")
PROGRAM = Path(__file__).with_name("resilient_server.py")
OPTIONS = (
    "--max-model-len", "1024", "--device-cache", "8M", "--host-cache", "8M", "--disk-cache", "16M", "--source", "load",
    "--shared-cache", "48M",
)  # fmt: skip


def others_rows(answers: list[Answer], text: Callable[[list[int]], str]) -> list[str]:
    """Find the answers that had more rows than their own tenant has ever asked for, or been told: they would be another's, who says the
    same. `text` decodes token ids.

    Where a server was killed before it answered, its tenant has rows of a prompt that no answer tells: as that server reads the text of
    earlier replies, which it may have in other tokens than the server that was asked again. So rows of the same text say nothing.
    """
    known: dict[int, list[list[int]]] = defaultdict(list)
    again: dict[int, list[str]] = defaultdict(list)
    found = []
    for answer in answers:
        nearest = max(known[answer.talk], key=partial(_alike, answer.prompt), default=[])
        own = _alike(answer.prompt, nearest)
        if answer.again:
            again[answer.talk].append(text([*answer.prompt, *answer.reply]))
        rows = text(answer.prompt[: answer.cached]).rstrip("\ufffd")  # of a character that the rows hold in part
        if answer.cached > own and not any(asked.startswith(rows) for asked in again[answer.talk]):
            where = f"{answer.usage['cached_tokens_details']}, server {answer.process}"
            rest = f"asked {answer.prompt[own : answer.cached + 1]}, its own {nearest[own : answer.cached + 1]}"
            found.append(f"tenant {answer.talk}: {answer.cached} rows ({where}), {own} of its own, then {rest}")
        known[answer.talk].append([*answer.prompt, *answer.reply])
    return found


def _alike(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class BadDirectory:
    """A Redis server on a bad line, that is killed and comes back empty."""

    def __init__(self, server: RedisServer, line: BadLine) -> None:
        self.server, self.line = server, line
        self.options = ("--shared-directory", f"redis://127.0.0.1:{line.port}/0")

    def restart(self, number: int) -> None:
        """Kill the server; every second time it is back at once, else at the next call."""
        self.server.kill()
        self.server.start()
        if number % 2:
            self.server.kill()


@contextlib.contextmanager
def bad_directory(folder: Path, seed: int) -> Iterator[BadDirectory | None]:
    """Run such a server; None: there is none here."""
    if found_binary() is None:
        yield None
        return
    server = RedisServer(folder)
    try:
        with bad_line(server.port, seed) as line:
            yield BadDirectory(server, line)
    finally:
        server.kill()


def chaos(
    folder: Path, kills: int, looks: int, monkeypatch: pytest.MonkeyPatch, scheme: str = "s3"
) -> tuple[SharedChaos, Counter[str], int]:
    """Play so many kills, and look at so many answers. Returns the run, the faults that were met, and the rows that came from the store."""
    seed = int(os.environ.get("CHAOS_SEED", random.getrandbits(32)))
    print(f"CHAOS_SEED={seed}")
    rng = random.Random(seed)
    with bad_store(scheme, seed, monkeypatch) as store, bad_directory(folder, seed) as directory:

        def trouble(number: int) -> None:
            store.line.cut(rng.uniform(0, 3))
            if directory is not None:
                directory.restart(number)

        for name in ("a", "b"):
            (folder / name).mkdir()
        options = (*OPTIONS, "--shared", f"{scheme}://{BUCKET}/kv", *(() if directory is None else directory.options))
        servers = [Server(folder / name, *options, program=(str(PROGRAM),)) for name in ("a", "b")]
        run = SharedChaos(servers, seed, trouble)
        run.play(kills)
        faults = store.faults + store.line.faults
        print(f"directory: {None if directory is None else dict(directory.line.faults)}")
    for server in servers:
        assert "Traceback" not in server.log.read_text()
    exact = Exact(folder)
    try:
        verifier = Verifier(load_model(BUNDLED, dtype="float32", device="cpu", max_model_len=None), exact, 0)
        for answer in random.Random(seed).sample(run.answers, min(looks, len(run.answers))):
            verifier.look(answer)
    finally:
        exact.server.kill()
    shared = sum(answer.usage["cached_tokens_details"]["shared"] for answer in run.answers)
    cached = sum(answer.cached for answer in run.answers)
    print(
        f"{kills} kills, {len(run.answers)} answers, {run.retried} asked again, {cached} rows cached, {shared} from the store"
    )
    print(f"{store.calls} calls of the store, {dict(faults)}; {verifier.furthest}")
    assert not verifier.wrong, "\n".join(verifier.wrong[:10])
    assert not others_rows(run.answers, Tokenizer(BUNDLED).decode)
    return run, faults, shared


@pytest.mark.timeout(300)
def test_a_kill_over_a_bad_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chaos(tmp_path, 1, 40, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scheme", ["az", "gs"])
def test_kills_over_a_bad_store_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    run, _, shared = chaos(tmp_path, 5, 10**9, monkeypatch, scheme)
    assert run.retried > 0
    assert shared > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thirty_kills_over_a_bad_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, faults, shared = chaos(tmp_path, 30, 10**9, monkeypatch)
    assert run.retried > 0
    assert shared > 0
    assert set(faults) == {*STORE_FAULTS, *LINE_FAULTS, "cut"}


def answered(talk: int, prompt: list[int], cached: int, reply: list[int], again: bool = False) -> Answer:
    details = {"device": cached, "host": 0, "disk": 0, "shared": 0}
    usage = {"prompt_tokens_details": {"cached_tokens": cached}, "cached_tokens_details": details}
    return Answer(talk, prompt, reply, [], True, 1.0, usage, 0, again)


def test_rows_of_others_are_told_from_those_of_a_server_that_was_killed() -> None:
    """A text is one token, 12, or two, 1 and 2: one server knows it as it was drawn, 12, another reads it as 1 and 2. The first is killed
    while it answers [12, 3, 4]; the second is asked the same, which is [1, 2, 3, 4] there. Later the first has rows of its own prompt."""

    def text(ids: list[int]) -> str:
        return "".join({12: "ab"}.get(token, "?abcdefghi"[token % 10]) for token in ids)

    first, more = answered(0, [], 0, [12]), answered(0, [12, 3, 4, 5], 3, [7])
    again = answered(0, [1, 2, 3, 4], 0, [5], again=True)
    assert others_rows([first, again, more], text) == []
    (told,) = others_rows([first, replace(again, again=False), more], text)
    assert told.startswith("tenant 0: 3 rows")
    assert others_rows([first, replace(again, talk=1), more], text) != []
    assert others_rows([first, replace(again, prompt=[1, 2, 6, 4]), more], text) != []
