"""Conversations with several servers over one store, of which one after the other is killed: every turn goes to any of those that live."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.faults.chaos import Answer, Server, drawn, said

TALKS = 4  # conversations at the same time, each of a tenant of its own; two say the same
TURNS = 7
MOST_AHEAD = (
    24  # answers after those that are waited for: on a slow machine, starts would else leave time for thousands
)


@dataclass
class SharedChaos:
    """Runs conversations against servers that `play` kills. Afterwards `answers` are all that came, in order."""

    servers: list[Server]
    seed: int
    trouble: Callable[[int], object]  # made before each kill, by its number
    answers: list[Answer] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    retried: int = 0

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._up: dict[int, int] = {}  # servers that live: which process of theirs
        self._over = False
        self._most = 0  # answers, for now

    def play(self, kills: int) -> None:
        """Start the servers; kill one in the middle of its turns, and start it again, so many times."""
        rng = random.Random(self.seed)
        talks = [threading.Thread(target=self._talk, args=(number,)) for number in range(TALKS)]
        try:
            for server in range(len(self.servers)):
                self._start(server)
            for talk in talks:
                talk.start()
            self._wait(TALKS)
            for number in range(kills):
                self._wait(rng.randrange(2, 8))
                self.trouble(number)
                time.sleep(rng.uniform(0.0, 0.3))
                victim = rng.randrange(len(self.servers))
                with self._changed:
                    del self._up[victim]
                self.servers[victim].kill()
                with self._changed:
                    self._changed.notify_all()
                self._start(victim)
            self._wait(TALKS)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            for talk in talks:
                if talk.ident is not None:
                    talk.join(120)
            for server in self.servers:
                if server.process is not None:
                    server.kill()
        if self.failures:
            raise self.failures[0]

    def _start(self, number: int) -> None:
        self.servers[number].start()
        self.servers[number].wait()
        with self._changed:
            self._up[number] = self.servers[number].started
            self._changed.notify_all()

    def _wait(self, answers: int) -> None:
        with self._changed:
            wanted = len(self.answers) + answers
            self._most = wanted + MOST_AHEAD
            self._changed.notify_all()
            there = self._changed.wait_for(lambda: len(self.answers) >= wanted or bool(self.failures), 180)
            assert there, "answers do not come"
        if self.failures:
            raise self.failures[0]

    def _talk(self, number: int) -> None:
        try:
            began = 0
            chosen = random.Random(f"{self.seed} {number}")
            with httpx.Client(timeout=120) as client:
                while not self._over:
                    self._chat(client, number, random.Random(f"{self.seed} {number // 2} {began}"), chosen)
                    began += 1
        except BaseException as failure:
            with self._changed:
                self.failures.append(failure)
                self._changed.notify_all()

    def _chat(self, client: httpx.Client, number: int, rng: random.Random, chosen: random.Random) -> None:
        messages: list[dict[str, str]] = []
        for _ in range(TURNS):
            messages.append({"role": "user", "content": said(rng)})
            body = {
                "messages": messages,
                "logprobs": True,
                "cache_salt": f"tenant {number}",
                **drawn(rng, "max_tokens"),
            }
            found = self._ask(client, body, chosen)
            if found is None:
                return
            done, process, again = found
            choice = done["choices"][0]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            greedy = body["temperature"] == 0
            answer = Answer(
                number,
                done["prompt_token_ids"],
                choice["token_ids"],
                logprobs,
                greedy,
                1.0,
                done["usage"],
                process,
                again,
            )
            with self._changed:
                self.answers.append(answer)
                self._changed.notify_all()
            messages.append({"role": "assistant", "content": choice["message"]["content"]})

    def _ask(
        self, client: httpx.Client, body: dict[str, Any], chosen: random.Random
    ) -> tuple[dict[str, Any], int, bool] | None:
        """The answer of any server, its number, and whether another was killed before it answered. None: it is over."""
        again = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self._up and len(self.answers) < self._most) or self._over)
                if self._over:
                    return None
                number = chosen.choice(sorted(self._up))
                process, url = self._up[number], self.servers[number].url
            try:
                done = client.post(f"{url}/v1/chat/completions", json={**body, "return_token_ids": True})
            except httpx.TransportError:
                again = True
                with self._changed:
                    self.retried += 1
                    if self._over:
                        return None
                    killed = self._up.get(number) != process
                    assert killed, "a connection was lost, but its server was not killed"
                continue
            assert done.status_code == 200, (done.status_code, done.text[:500])
            return done.json(), number, again
