"""Six faults through a whole server: `afterglow serve` on the bundled model, over HTTP. The answers are compared with
those of a server that has no cache, turn by turn.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from afterglow.store import admin
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.extents.head import crc32c, encode_head
from afterglow.store.namespace.namespace import read_description
from tests.faults import report
from tests.ports import own_port
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "src/afterglow/assets/model"
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here"),
]

SMALL = ("--device-cache", "4M", "--host-cache", "4M", "--disk-cache", "32M", "--threads", "1", "--grace", "1")
SAID = (
    "My name is Ada. I keep the red kite in the old mill near the river.",
    "Who flies the kite when the wind is strong?",
    "And where is the mill?",
    "Tell me the story of the mill once more.",
)
LOADS = ("--source", "load")  # where computing is predicted to be faster, as on a busy machine, nothing would be read
STORED = 2  # turns that the cache directory of `stored` has heard
TIE = 1e-3  # a top-2 gap of log-probabilities below which float rounding may choose either token


@dataclass
class Turn:
    """A reply as the caller sees it: per token its text and the gap to the second best."""

    text: str
    tokens: list[tuple[str, float]]
    cached: dict[str, int]


@dataclass
class Server:
    """A server process. `fault`: a row of `faulty_server.RULES`."""

    folder: Path
    fault: str = "none"
    options: Sequence[str] = ()
    log: str = ""
    process: subprocess.Popen[str] = field(init=False)
    client: httpx.Client = field(init=False)

    def __enter__(self) -> Server:
        port = own_port()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.faulty_server", self.fault, str(self.folder),
             "serve", "afterglow-small", "--port", str(port), "--cache-dir", str(self.folder), *SMALL, *self.options],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        deadline = time.monotonic() + 90
        while not self.answers():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, "it does not start"
            time.sleep(0.1)
        return self

    def answers(self) -> bool:
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.wait()

    def wait(self) -> int:
        self.client.close()
        _, log = self.process.communicate(timeout=60)
        self.log += log
        assert "Traceback" not in self.log, self.log
        return self.process.returncode

    def ask(self, messages: list[dict[str, str]]) -> Turn:
        body = {
            "messages": messages,
            "temperature": 0,
            "max_tokens": 24,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 2,
        }
        answer = self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        choice = found["choices"][0]
        tokens = []
        for token in choice["logprobs"]["content"]:
            best = sorted((top["logprob"] for top in token["top_logprobs"]), reverse=True)
            tokens.append((token["token"], best[0] - best[1]))
        return Turn(choice["message"]["content"], tokens, found["usage"]["cached_tokens_details"])

    def counter(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"afterglow:{name}"))


def talk(turns: list[Turn], upto: int) -> list[dict[str, str]]:
    """The messages before turn `upto` is answered, as the server without a cache has answered."""
    messages = []
    for number in range(upto):
        messages += [{"role": "user", "content": SAID[number]}, {"role": "assistant", "content": turns[number].text}]
    return [*messages, {"role": "user", "content": SAID[upto]}]


def same(turn: Turn, reference: Turn) -> None:
    """Equal, or a tie at the first difference."""
    for (token, _), (wanted, gap) in zip(turn.tokens, reference.tokens, strict=True):
        if token != wanted:
            assert gap < TIE, f"{turn.text!r} is not {reference.text!r}"
            return
    assert turn.text == reference.text


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[Turn]:
    """The whole conversation with a server that has no cache."""
    turns: list[Turn] = []
    with Server(tmp_path_factory.mktemp("none"), options=["--no-reuse"]) as server:
        for number in range(len(SAID)):
            turns.append(server.ask(talk(turns, number)))
            assert sum(turns[-1].cached.values()) == 0
    return turns


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, reference: list[Turn]) -> Path:
    """A cache directory that a server has left in good order after the first turns."""
    folder = tmp_path_factory.mktemp("stored")
    with Server(folder) as server:
        for number in range(STORED):
            same(server.ask(talk(reference, number)), reference[number])
    return folder


@pytest.fixture
def folder(tmp_path: Path, stored: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "cache"))


def namespace(folder: Path) -> Path:
    (found,) = [path for path in folder.iterdir() if path.is_dir()]
    return found


def check(folder: Path) -> list[admin.Problem]:
    """Return the problems that `cache check` names once no process holds the directory."""
    return admin.check(namespace(folder)).problems


def largest(folder: Path) -> Path:
    return max(namespace(folder).glob("extents/*/*.safetensors"), key=lambda file: file.stat().st_size)


def flip(folder: Path) -> None:
    data = bytearray(largest(folder).read_bytes())
    data[len(data) // 2] ^= 4
    largest(folder).write_bytes(data)


def truncate(folder: Path) -> None:
    os.truncate(largest(folder), largest(folder).stat().st_size // 2)


def swap_model(folder: Path) -> None:
    """An extent of the same shape that another model has written, under this one's name."""
    file, description = largest(folder), read_description(namespace(folder))
    layout = description.layout
    record = DiskTier(namespace(folder) / "extents", layout, description.digest, inspect=True).head_of(file).record
    rows = layout.padded_rows(record.rows)
    body = np.random.default_rng(1).integers(0, 256, layout.layers * 2 * rows * layout.row_bytes, np.uint8)
    chunks = body.reshape(layout.layers, 2, -1, layout.chunk_bytes)
    crcs = np.array([[[crc32c(chunk) for chunk in kv] for kv in layer] for layer in chunks], np.uint32)
    file.write_bytes(encode_head(layout, "0" * 64, record, crcs) + body.tobytes())
    assert file.stat().st_size == record.file_bytes


def play(server: Server, reference: list[Turn], first: int) -> list[Turn]:
    turns = []
    for number in range(first, len(SAID)):
        turns.append(server.ask(talk(reference, number)))
        same(turns[-1], reference[number])
    return turns


Harmed = dict[str, "Future[tuple[list[Turn], float, list[admin.Problem]]]"]
Cell = tuple[str, str]  # of `report.FAULTS`, and how it is injected
HARMED: dict[str, tuple[Cell, Callable[[Path], None]]] = {
    "flip": (("bit flip in values", "a bit of the largest file, before the start"), flip),
    "truncated": (("truncated file", "half of the largest file, before the start"), truncate),
    "model": (("extent of another model", "under the largest file's name, before the start"), swap_model),
}
FULL: Cell = ("no space (ENOSPC)", "every write of an extent, from the start on")
HANG: Cell = ("hanging disk", "the first read hangs four times as long as the time-out")
KILL: Cell = ("kill -9", "in the middle of a write, while it serves")
CELLS = [*(cell for cell, _ in HARMED.values()), FULL, HANG, KILL]
report.expect(((fault, report.SERVER, how), "") for fault, how in CELLS)


def told(cell: Cell, *story: str) -> None:
    report.happened((cell[0], report.SERVER, cell[1]), ["same answers", *story])


@pytest.fixture(scope="module")
def harmed(tmp_path_factory: pytest.TempPathFactory, stored: Path, reference: list[Turn]) -> Iterator[Harmed]:
    """One server for each harmed file, side by side: they spend most of their time starting."""

    def serve(name: str) -> tuple[list[Turn], float, list[admin.Problem]]:
        folder = Path(shutil.copytree(stored, tmp_path_factory.mktemp(name) / "cache"))
        HARMED[name][1](folder)
        assert [problem.kind for problem in check(folder)] == ["damaged"]
        with Server(folder, options=LOADS) as server:
            turns = play(server, reference, STORED)
            damaged = server.counter("damaged_extents_total")
        return turns, damaged, check(folder)

    with ThreadPoolExecutor(len(HARMED)) as pool:
        yield {name: pool.submit(serve, name) for name in HARMED}


@pytest.mark.parametrize("name", HARMED)
def test_harmed_file(harmed: Harmed, name: str) -> None:
    (first, second), damaged, problems = harmed[name].result()
    assert damaged == 1
    assert sum(second.cached.values()) > sum(first.cached.values())
    assert problems == []
    told(
        HARMED[name][0],
        "damaged_extents counts one",
        "the turn after it is cached again",
        "`cache check` finds it sound",
    )


def test_no_space_for_saves(tmp_path: Path, reference: list[Turn]) -> None:
    with Server(tmp_path / "cache", "full", ["--write-policy", "write_through"]) as server:
        turns = play(server, reference, 0)
        wait_for(lambda: server.counter("store_failures_total") > 0)
    assert sum(turns[-1].cached.values()) > 0
    assert list(namespace(tmp_path / "cache").glob("extents/*/*")) == []
    assert check(tmp_path / "cache") == []
    told(FULL, "store_failures counts", "later turns are cached in memory", "`cache check` finds it sound")


def test_a_disk_that_hangs(folder: Path, reference: list[Turn]) -> None:
    with Server(folder, "hang", LOADS) as server:
        first, second = play(server, reference, STORED)
        failures = server.counter("load_failures_total")
    assert failures > 0
    assert sum(second.cached.values()) > sum(first.cached.values())
    assert check(folder) == []
    told(HANG, "load_failures counts", "the turn after it is cached again", "`cache check` finds it sound")


def test_kill_9_in_the_middle_of_a_save(tmp_path: Path, reference: list[Turn]) -> None:
    folder = tmp_path / "cache"
    server = Server(folder, "kill", ["--write-policy", "write_through"]).__enter__()
    with contextlib.suppress(httpx.TransportError):  # it may die while it is being asked
        play(server, reference, 0)
    assert server.wait() == -signal.SIGKILL
    assert {problem.kind for problem in check(folder)} <= {"leftover", "orphan"}
    with Server(folder) as restarted:
        turns = play(restarted, reference, 0)
    assert sum(turns[-1].cached.values()) > 0
    assert check(folder) == []
    told(KILL, "the next process finds whole extents only", "`cache check` finds it sound")
