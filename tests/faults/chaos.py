"""Four conversations with a server that is killed again and again, and what it answered.

Each answer comes with the token ids of its prompt and of its reply, so that it can be computed again elsewhere.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.ports import own_port

WINDOW = 384
BUDGET = 16 * 2**20  # bytes on disk: about 2,700 rows of the bundled model
SHARE = 0.4  # of the prefix that requests attend to which do not say
SYSTEM = "You keep in mind what people tell you about themselves and about their things, and you answer in one short sentence."
OPTIONS = (
    "--max-model-len", str(WINDOW), "--device-cache", "8M", "--host-cache", "8M", "--disk-cache", str(BUDGET),
    "--importance", str(SHARE), "--chat-truncation", "auto", "--source", "load", "--reorder-interval", "2",
)  # fmt: skip
TURNS = 14  # after which a conversation begins anew
NAMES = ("Ada", "Bob", "Eve", "Tom", "Ann", "Joe")
THINGS = ("red kite", "blue lantern", "green boat", "old clock", "brown horse", "small key")
PLACES = ("in the mill", "near the river", "behind the door", "on the shelf", "under the bridge", "in the garden")


@dataclass
class Answer:
    """Records one turn: the prompt as token ids, the reply, and the server's account of the reply.

    `logprobs`: of the reply's tokens, where the endpoint tells them. `share`: the share of the cached prefix that was asked
    for. `process`: the number of the process that answered, from 1. `again`: a process killed before had got the same turn.
    """

    talk: int
    prompt: list[int]
    reply: list[int]
    logprobs: list[float] | None
    greedy: bool
    share: float
    usage: dict[str, Any]
    process: int
    again: bool

    @property
    def cached(self) -> int:
        return sum(self.usage["cached_tokens_details"].values())

    @property
    def dropped(self) -> int:
        return int(self.usage.get("truncation", {}).get("dropped_tokens", 0))

    @property
    def selected(self) -> dict[str, Any] | None:
        return self.usage.get("kv_selection")


class Server:
    """`afterglow serve` on one cache folder: one process after another. `program`: what Python runs as `afterglow`."""

    def __init__(self, folder: Path, *options: str, program: tuple[str, ...] = ("-m", "afterglow.cli")) -> None:
        self.folder, self.options, self.program = folder, options, program
        self.log = folder / f"log-{random.getrandbits(32):08x}"
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.started = 0

    def start(self) -> None:
        port = own_port()
        command = [
            sys.executable,
            *self.program,
            "serve",
            "afterglow-small",
            "--port",
            str(port),
            "--threads",
            "1",
        ]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, "--cache-dir", str(self.folder / "cache"), *self.options],
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.url = f"http://127.0.0.1:{port}"
        self.started += 1

    def wait(self) -> None:
        assert self.process is not None
        for _ in range(1200):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=30).status_code == 200:
                    return
            assert self.process.poll() is None, f"a start was refused: {self.log.read_text()[-4000:]}"
            time.sleep(0.1)
        raise AssertionError("it does not start")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stored(self) -> int:
        """Bytes of extents and of temporary files, while nothing runs."""
        return sum(path.stat().st_size for path in (self.folder / "cache").rglob("*.safetensors*") if path.is_file())


@dataclass
class Chaos:
    """Runs conversations against a server that `play` kills. Afterwards `answers` are all that came, in order."""

    server: Server
    seed: int
    answers: list[Answer] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    retried: int = 0
    most_stored: int = 0

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._generation = 0  # of the process that answers; 0 while none does
        self._over = False

    def play(self, cycles: int) -> None:
        """Start the server, let it answer, kill it, so many times; then once more, until each conversation went on."""
        rng = random.Random(self.seed)
        talks = [threading.Thread(target=self._talk, args=(number,)) for number in range(4)]
        for talk in talks:
            talk.start()
        try:
            for cycle in range(cycles):
                self.server.start()
                if cycle % 5 == 3:  # while it starts
                    time.sleep(rng.uniform(0.3, 3.0))
                else:
                    self._serve(rng.randrange(8, 24))
                    time.sleep(rng.uniform(0.0, 0.15))
                self._serves(False)
                self.server.kill()
                self.most_stored = max(self.most_stored, self.server.stored())
            self.server.start()
            self._serve(8)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            for talk in talks:
                talk.join(120)
            self.server.kill()
            self.most_stored = max(self.most_stored, self.server.stored())
        if self.failures:
            raise self.failures[0]

    def _serve(self, answers: int) -> None:
        self.server.wait()
        self._serves(True)
        with self._changed:
            wanted = len(self.answers) + answers
            there = self._changed.wait_for(lambda: len(self.answers) >= wanted or bool(self.failures), 180)
            assert there, "answers do not come"
        if self.failures:
            raise self.failures[0]

    def _serves(self, yes: bool) -> None:
        with self._changed:
            self._generation = self.server.started if yes else 0
            self._changed.notify_all()

    def _talk(self, number: int) -> None:
        try:
            began = 0
            with httpx.Client(timeout=120) as client:
                while not self._over:
                    rng = random.Random(f"{self.seed} {number} {began}")
                    began += 1
                    (self._responses if number == 2 else self._chat)(client, number, rng)
        except BaseException as failure:
            with self._changed:
                self.failures.append(failure)
                self._changed.notify_all()

    def _chat(self, client: httpx.Client, number: int, rng: random.Random) -> None:
        messages: list[dict[str, str]] = []
        for turn in range(TURNS):
            share = (1.0, None, None, (1.0, 0.3)[turn % 2])[number]
            messages.append({"role": "user", "content": said(rng)})
            body = {"messages": messages, "logprobs": True, "kv_retention": share, **drawn(rng, "max_tokens")}
            found = self._ask(client, "/v1/chat/completions", body)
            if found is None:
                return
            done, process, again = found
            choice = done["choices"][0]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            share = SHARE if share is None else share
            self._answered(done, body, number, choice["token_ids"], logprobs, share, process, again)
            messages.append({"role": "assistant", "content": choice["message"]["content"]})
            time.sleep(rng.uniform(0.0, 0.1))

    def _responses(self, client: httpx.Client, number: int, rng: random.Random) -> None:
        previous = None
        for _ in range(TURNS):
            body = {"input": said(rng), "previous_response_id": previous, "truncation": "auto", "kv_retention": 1.0}
            found = self._ask(client, "/v1/responses", body | drawn(rng, "max_output_tokens"))
            if found is None:
                return
            done, process, again = found
            self._answered(done, done, number, done["token_ids"], None, 1.0, process, again)
            previous = done["id"]
            time.sleep(rng.uniform(0.0, 0.1))

    def _answered(
        self, done: dict[str, Any], body: dict[str, Any], talk: int, reply: list[int], logprobs: list[float] | None,
        share: float, process: int, again: bool,
    ) -> None:  # fmt: skip
        greedy = body["temperature"] == 0
        answer = Answer(talk, done["prompt_token_ids"], reply, logprobs, greedy, share, done["usage"], process, again)
        with self._changed:
            self.answers.append(answer)
            self._changed.notify_all()

    def _ask(self, client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], int, bool] | None:
        """The answer of whatever process gives one, which one that is, and whether one was asked before that was killed. None:
        it is over."""
        again = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._generation or self._over)
                if self._over:
                    return None
                generation, url = self._generation, self.server.url
            try:
                done = client.post(url + path, json={**body, "return_token_ids": True})
            except httpx.TransportError:
                again = True
                with self._changed:
                    self.retried += 1
                    gone = self._changed.wait_for(lambda: self._generation != generation or self._over, 60)  # noqa: B023
                    assert gone, "a connection was lost, but the server was not killed"
                continue
            assert done.status_code == 200, (path, done.status_code, done.text[:500])
            return done.json(), generation, again


def said(rng: random.Random) -> str:
    """Make a user's message: facts, and a question."""
    facts = [
        f"{rng.choice(NAMES)} keeps the {rng.choice(THINGS)} {rng.choice(PLACES)}." for _ in range(rng.randint(1, 3))
    ]
    return " ".join([*facts, f"Where is the {rng.choice(THINGS)}?"])


def drawn(rng: random.Random, limit: str) -> dict[str, Any]:
    """Choose how a reply is drawn: greedily, or so that it becomes a text unlike any in training."""
    greedy = rng.random() < 0.5
    return {"temperature": 0 if greedy else 1.5, "seed": rng.getrandbits(30), limit: rng.randint(4, 16)}
