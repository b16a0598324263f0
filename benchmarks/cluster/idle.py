"""What a shared store costs a server that has one: two servers without a store and one with it, that take turns.

Each arm is a part of a second, and the arms of a round come one after the other, in another order each round, so that what the machine does
beside them meets all alike. Told is, over the rounds, the median of an arm's cost over that of the first server in the same round, with a
confidence interval that supposes nothing of how they are spread; and the same for the second server without a store, which shows what
a difference of nothing looks like. The processor time of the server's process is told beside wall time: it hardly depends on what else runs.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.peers.processes import Child, free_port

STREAMS, PROMPT, REPLY = 4, 32, 96  # requests at a time, and tokens of each: too few to be looked up
SURE = 0.95  # that the median lies within the interval
START_S = 120.0
REST_S = 20.0  # some of a server's looks at what the others have told, one every two seconds
OPTIONS = ("--device-cache", "64M", "--host-cache", "64M", "--disk-cache", "1G", "--write-policy", "write_through")
# in_memory: nothing is written, and so nothing is published. Otherwise all is.
KINDS = {"idle": "in_memory", "publishing": "24h"}


@dataclass(frozen=True)
class Arm:
    """A server, in a process of its own."""

    child: Child
    client: httpx.Client

    def cost(self, prompts: Sequence[list[int]], retention: str) -> tuple[float, float]:
        """Answer prompts side by side. Returns seconds of wall time and of the server's processor time, for each token."""
        cpu, began = cpu_seconds(self.child.process.pid), time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            tokens = sum(pool.map(lambda prompt: self._answer(prompt, retention), prompts))
        return (time.perf_counter() - began) / tokens, (cpu_seconds(self.child.process.pid) - cpu) / tokens

    def _answer(self, prompt: list[int], retention: str) -> int:
        body = {"prompt": prompt, "max_tokens": REPLY, "temperature": 0, "ignore_eos": True}
        done = self.client.post("/v1/completions", json={**body, "prompt_cache_retention": retention})
        done.raise_for_status()
        return int(done.json()["usage"]["completion_tokens"])


def cpu_seconds(pid: int) -> float:
    """The processor time of a process, of all its threads, also those that have ended. Its clock is Linux' own, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | 2)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and an interval in which that of all such values lies with `SURE`: from the binomial of how many are below it."""
    ordered, n = sorted(values), len(values)
    out, tail = 0, 0.5**n  # values left out at either end; the chance that no more than those are beyond the median
    while out + 1 < n // 2 and (more := tail + math.comb(n, out + 1) * 0.5**n) <= (1 - SURE) / 2:
        out, tail = out + 1, more
    return statistics.median(ordered), ordered[out], ordered[-1 - out]


def measure(model: str, rounds: int, folder: Path, seed: int, threads: int | None) -> list[dict[str, Any]]:
    """One row for each kind: the ratios of cost per token, by wall time and processor time; and one of servers that have nothing to do."""
    rng = random.Random(seed)
    store = ("--shared", f"file://{folder / 'costs'}")
    with ExitStack() as stack:
        made = {"without": (), "without again": (), "with": store}
        arms = {name: _start(stack, model, folder / name, threads, more) for name, more in made.items()}
        for arm in arms.values():
            _wait(arm)
        costs = [{"what": "idle", "kind": kind, **_rounds(arms, rounds, kind, rng)} for kind in KINDS]
        return [*costs, {"what": "at rest", "seconds": REST_S, "cores": _at_rest(arms)}]


def _at_rest(arms: dict[str, Arm]) -> dict[str, float]:
    """The part of a core that each server takes that has nothing to do, all at the same time."""
    time.sleep(REST_S / 4)  # for what the last requests have left
    before = {name: cpu_seconds(arm.child.process.pid) for name, arm in arms.items()}
    time.sleep(REST_S)
    return {name: (cpu_seconds(arm.child.process.pid) - before[name]) / REST_S for name, arm in arms.items()}


def _rounds(arms: dict[str, Arm], rounds: int, kind: str, rng: random.Random) -> dict[str, Any]:
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        prompts = [[rng.randrange(6, 2000) for _ in range(PROMPT)] for _ in range(STREAMS)]
        for name in rng.sample(sorted(arms), len(arms)):
            cost = arms[name].cost(prompts, KINDS[kind])
            if number:  # the first round is for what is loaded late
                costs[name].append(cost)
    found: dict[str, Any] = {"rounds": rounds}
    for at, what in enumerate(("wall", "cpu")):
        found[what] = {
            "tokens_per_s": {name: 1 / statistics.median(each[at] for each in of) for name, of in costs.items()},
            **{
                name: dict(zip(("ratio", "low", "high"), interval(_ratios(costs, name, at)), strict=True))
                for name in ("without again", "with")
            },
        }
    return found


def _ratios(costs: dict[str, list[tuple[float, float]]], name: str, at: int) -> list[float]:
    return [one[at] / base[at] for one, base in zip(costs[name], costs["without"], strict=True)]


def _start(stack: ExitStack, model: str, folder: Path, threads: int | None, more: Sequence[str]) -> Arm:
    port = free_port()
    command = [sys.executable, "-m", "afterglow.cli", "serve", model, "--port", str(port), *OPTIONS, *more]
    command += ["--cache-dir", str(folder), "--log-level", "warning"]
    command += ["--threads", str(threads)] if threads is not None else []
    child = Child(command, folder.with_suffix(".log"))
    stack.callback(child.stop)
    return Arm(child, stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)))


def _wait(arm: Arm) -> None:
    def ready() -> bool:
        try:
            return arm.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    arm.child.wait_until(ready, START_S)
