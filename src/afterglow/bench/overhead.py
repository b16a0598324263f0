"""What HTTP adds to the first and the last token of a reply, and what the engine's own bookkeeping costs beside a decode step."""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from queue import SimpleQueue
from typing import Any

import httpx

from afterglow.bench import plain_environment
from afterglow.bench.report import arguments, finish, goal, show, spread
from afterglow.bench.timed_requests import greedy, running, words
from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.index import Index, extent_id
from afterglow.request import Output

PROMPT = 32  # tokens: few, so that a delay of the first packets cannot hide behind prefill
STREAMED = 16  # tokens of a reply


def main(args: Sequence[str]) -> int:
    """`afterglow bench overhead`."""
    options = arguments("afterglow bench overhead", __doc__ or "").parse_args(args)
    rng = random.Random(options.seed)
    rows = [
        *http_overhead(rng, 10 if options.quick else 40, options.threads),
        bookkeeping(rng, 64 if options.quick else 256, options.threads),
        index_match(rng, 10_000 if options.quick else 100_000),
    ]
    show("overheads", ("", "median", "unit"), [(r["name"], r["value"], r["unit"]) for r in rows])
    first, _, between, kept, matched = rows
    wanted = [
        ("first token over HTTP, connection kept alive, minus library, ms", first, 10, False),
        ("time between first and last token, HTTP / library", between, 0.8, True),
        ("bookkeeping / decode step at batch 8", kept, 0.02, False),
        (f"match of 32K tokens in {matched['extents']:,} extents, ms", matched, 2, False),
    ]
    goals = []
    for name, row, bound, least in wanted:
        noise = row["spread"] * abs(row["value"]) / bound  # a row's is a share of its value, a goal's one of the bound
        goals.append(goal(name, row["value"], bound, least=least, spread=noise))
    finish(options, rows, goals)
    return 0


def http_overhead(rng: random.Random, repeats: int, threads: int | None) -> list[dict[str, Any]]:
    """The bundled model in this process and behind a server in another, the same kind of prompts in turn.

    All requests of the server share one connection: a new one for each would hide the delays of connections that are kept alive.
    """
    model = str(files("afterglow") / "assets" / "model")
    config = EngineConfig(cache=CacheConfig(disk_cache=0), threads=threads)
    extra = ["--threads", str(threads)] if threads else []
    library, http = [], []
    with (
        running(model, config) as engine,
        model_server([model, "--disk-cache", "0", *extra]) as url,
        httpx.Client(timeout=60, trust_env=False) as client,  # no proxy leads there
    ):
        prompts = iter(lambda: [rng.randrange(300, engine.vocab_size) for _ in range(PROMPT)], None)
        for _ in range(repeats + 2):
            library.append(_library(engine, next(prompts)))
            http.append(_http(client, url, next(prompts)))
    ports = {reply.port for reply in http}
    del library[:2], http[:2]
    if len(ports) > 1:
        raise RuntimeError("the server closed a connection that was to be kept alive")
    return [
        difference("first token", [r.first_ms for r in library], [r.first_ms for r in http]),
        difference("last token", [r.last_ms for r in library], [r.last_ms for r in http]),
        {
            "name": f"time between the first and the last of {STREAMED} tokens, HTTP / library",
            "value": round(_between(http) / _between(library), 3),
            "unit": "",
            "library_ms": round(_between(library), 3),
            "http_ms": round(_between(http), 3),
            "spread": round(max(spread([r.last_ms - r.first_ms for r in part]) for part in (library, http)), 4),
        },
    ]


def _between(replies: list[TimedReply]) -> float:
    return statistics.median(reply.last_ms - reply.first_ms for reply in replies)


def difference(what: str, library: list[float], http: list[float]) -> dict[str, Any]:
    """Compare times that were measured in turn. What is slow for both at a time is no noise of the difference."""
    more = [there - here for here, there in zip(library, http, strict=True)]
    return {
        "name": f"{what} over HTTP, connection kept alive, minus library",
        "value": round(statistics.median(more), 3),
        "unit": "ms",
        "library_ms": round(statistics.median(library), 3),
        "http_ms": round(statistics.median(http), 3),
        "spread": round(spread(more), 4),
    }


@dataclass(frozen=True, slots=True)
class TimedReply:
    """When the first and the last token of a reply came, and from which of the client's ports it was asked for."""

    first_ms: float
    last_ms: float
    port: int = 0


def _library(engine: Engine, prompt: list[int]) -> TimedReply:
    came: SimpleQueue[tuple[float, Output]] = SimpleQueue()
    began = time.perf_counter()
    engine.submit(greedy(prompt, STREAMED), lambda out: came.put((time.perf_counter(), out)))
    times: list[float] = []
    while True:
        at, output = came.get(timeout=60)
        times += [(at - began) * 1e3] * len(output.tokens)
        if output.finish_reason is not None:
            return TimedReply(times[0], times[-1])


def _http(client: httpx.Client, url: str, prompt: list[int]) -> TimedReply:
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": STREAMED,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    began = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        times = [(time.perf_counter() - began) * 1e3 for _ in lines]  # to the end: the connection shall stay
        port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
    if not times:
        raise RuntimeError("the server sent no token")
    return TimedReply(times[0], times[-1], port)


@contextmanager
def model_server(args: list[str]) -> Iterator[str]:
    """Run `afterglow serve` with these arguments, and yield its address."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "afterglow.cli", "serve", *args, "--port", "0", "--served-model-name", "m"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=plain_environment(),
        )
        try:
            yield _address(process, log.fileno())
        finally:
            process.terminate()
            process.wait(30)


def _address(process: subprocess.Popen[bytes], log: int) -> str:
    """Wait until a server answers at the address that it has logged. Raises: RuntimeError."""
    for _ in range(1200):
        said = os.pread(log, 1 << 20, 0).decode(errors="replace")  # which leaves alone where the server writes
        if found := re.search(r" at (http://\S+)/v1\n", said):
            with suppress(httpx.HTTPError):
                if httpx.get(f"{found[1]}/health", timeout=1, trust_env=False).status_code == 200:
                    return found[1]
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {said[-2000:]}")
        time.sleep(0.1)
    raise RuntimeError(f"the server does not answer: {said[-2000:]}")


def bookkeeping(rng: random.Random, tokens: int, threads: int | None) -> dict[str, Any]:
    """Share of a decode step at batch 8 that schedule, commit and index take (`bench-100m`)."""
    config = EngineConfig(cache=CacheConfig(disk_cache=0), threads=threads, speculate="off")
    with running("bench-100m", config) as engine:
        prompts = [words(rng, engine, 64) for _ in range(8)]
        engine.generate([greedy([1, 2, 3], 4)])  # warms memory
        shares, plans, forwards = [], [], []
        for _ in range(3):
            before = engine.stats()
            engine.generate([greedy(prompt, tokens) for prompt in prompts])
            after = engine.stats()
            steps = after.engine.steps - before.engine.steps
            plans.append((after.engine.plan_seconds - before.engine.plan_seconds) / steps)
            forwards.append((after.engine.forward_seconds - before.engine.forward_seconds) / steps)
            shares.append(plans[-1] / (plans[-1] + forwards[-1]))
    return {
        "name": "schedule + commit + index, share of a decode step at batch 8",
        "value": round(statistics.median(shares), 5),
        "unit": "",
        "plan_ms_per_step": round(statistics.median(plans) * 1e3, 4),
        "forward_ms_per_step": round(statistics.median(forwards) * 1e3, 3),
        "spread": round(spread(shares), 4),
    }


def index_match(rng: random.Random, extents: int) -> dict[str, Any]:
    """A 32K-token prompt, wholly cached in extents of 1,024 rows, among many others that branch from it."""
    index, prompt = _index(rng, extents)
    samples = []
    for _ in range(50):
        began = time.perf_counter()
        match = index.match("", prompt)
        samples.append((time.perf_counter() - began) * 1e3)
        assert match.rows == len(prompt) // 4
    return {
        "name": f"match of a 32,768-token prompt among {extents:,} extents",
        "value": round(statistics.median(samples), 4),
        "unit": "ms",
        "extents": extents,
        "spread": round(spread(samples), 4),
    }


def _tokens(rng: random.Random, n: int) -> bytes:
    return array("I", [rng.randrange(32_000) for _ in range(n)]).tobytes()


def _index(rng: random.Random, extents: int) -> tuple[Index, bytes]:
    index = Index()
    prompt = b""
    for _ in range(32):
        own = _tokens(rng, 1024)
        _add(index, prompt, own)
        prompt += own
    for _ in range(extents - 32):  # branches anywhere, splits included
        cut = rng.randrange(1, 32_768) * 4
        _add(index, prompt[:cut], _tokens(rng, 64))
    return index, prompt


def _add(index: Index, prefix: bytes, own: bytes) -> None:
    extent = Extent(
        id=extent_id("bench", "", prefix, own),
        salt="",
        kind="exact",
        tokens=own,
        first_row=len(prefix) // 4,
        file_bytes=0,
        created_at=0.0,
        serial=len(index.extents),
    )
    index.insert(extent, prefix)
