#!/usr/bin/env python3
"""What an engine in a process of its own gains: clients that stream replies, from a server with such a process and from one without.

The bundled model, so that a step takes a millisecond and HTTP and text as long as on a GPU with a large one. One compute thread: the
server's process has a core for itself where there are two. The arms take turns; one is there twice, for what repeats differ by.

    python -m benchmarks.engine.engine_process [--quick] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from afterglow.bench.overhead import model_server
from afterglow.bench.report import arguments, finish, goal, interleaved, show, spread

CLIENTS = (1, 8, 24)
TOKENS = 200  # of a reply
ARMS = {"in the server's process": "off", "in its own": "on", "in the server's process, again": "off"}
TEXT = "Ada keeps the red kite in the mill. Tell me about it."


def main(args: list[str]) -> int:
    options = arguments("python -m benchmarks.engine.engine_process", __doc__ or "").parse_args(args)
    threads = str(options.threads or 1)
    model = ("afterglow-small", "--threads", threads, "--disk-cache", "0", "--max-batch", "32")
    with (
        model_server([*model, "--engine-process", "off"]) as inside,
        model_server([*model, "--engine-process", "on"]) as apart,
    ):
        urls = {"off": inside, "on": apart}
        rows = [measured(urls, clients, 3 if options.quick else 12) for clients in CLIENTS]
    show(
        f"streams of {TOKENS} tokens",
        ("clients", "", "tokens/s", "first token, ms"),
        [(row["clients"], arm, row["rate"][arm], row["first_ms"][arm]) for row in rows for arm in ARMS],
    )
    goals = [
        goal(f"tokens/s of {row['clients']} clients, own process / server's", row["ratio"], 1.0, least=True, spread=row["spread"])
        for row in rows[1:]
    ]  # fmt: skip
    finish(options, rows, goals)
    return 0


def measured(urls: Mapping[str, str], clients: int, rounds: int) -> dict[str, Any]:
    """Measure a number of clients in all arms, in turn."""
    first: dict[str, list[float]] = {arm: [] for arm in ARMS}

    def rate(arm: str) -> float:
        began = time.perf_counter()
        firsts = asyncio.run(streams(urls[ARMS[arm]], clients))
        first[arm].append(statistics.median(firsts))
        return clients * TOKENS / (time.perf_counter() - began)

    for arm in ARMS:
        rate(arm)
    first = {arm: [] for arm in ARMS}
    rates = interleaved({arm: lambda arm=arm: rate(arm) for arm in ARMS}, rounds)  # type: ignore[misc]
    here, own, again = rates.values()
    return {
        "clients": clients,
        "rate": {arm: round(statistics.median(found), 1) for arm, found in rates.items()},
        "first_ms": {arm: round(statistics.median(found) * 1e3, 2) for arm, found in first.items()},
        "ratio": round(statistics.median(o / h for o, h in zip(own, here, strict=True)), 3),
        "again": round(statistics.median(a / h for a, h in zip(again, here, strict=True)), 3),
        "spread": round(
            max(spread([a / h for a, h in zip(again, here, strict=True)]), *map(spread, rates.values())), 4
        ),
    }


async def streams(url: str, clients: int) -> list[float]:
    """Stream replies to so many clients at a time. Returns the seconds until the first token of each."""
    return await asyncio.gather(*(_stream(url, seed) for seed in range(clients)))


async def _stream(url: str, seed: int) -> float:
    """Read a reply as bytes: a client that parses it would take more time than the server."""
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": TOKENS, "ignore_eos": True, "seed": seed, "stream": True}  # fmt: skip
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    host, _, port = url.rpartition("/")[2].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    began = time.perf_counter()
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    first, said = None, b""
    while some := await reader.read(65536):
        said = said[-16:] + some
        if first is None and b"data: {" in said:
            first = time.perf_counter() - began
    writer.close()
    assert first is not None
    assert b"[DONE]" in said, said
    return first


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
