"""One streaming client for all servers. It shares the cores with them, so it costs little: sockets, and no more parsing than needed.

`POST /v1/completions` with token ids as prompt works in Afterglow, vLLM and llama.cpp alike. Each answer's text names its tokens
(`weights.word`), so that they are counted and compared and not only believed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.peers.processes import PeerError
from benchmarks.peers.weights import tokens_in

T = TypeVar("T")

TIMEOUT = 180.0  # seconds for one answer
_LIMIT = 2**20  # bytes of the longest line


@dataclass
class Turn:
    """One answer. Times are of `time.perf_counter`; `cached`: of the prompt's tokens, as the server says, None if it does not."""

    asked: float
    first: float = 0.0
    last: float = 0.0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached: int | None = None
    tiers: dict[str, int] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        return self.first - self.asked


class Client:
    """A client of one server. `more` are fields that this server wants in every request."""

    def __init__(self, name: str, port: int, model: str, more: dict[str, Any] | None = None) -> None:
        self.name = name
        self.port = port
        self._body = {"model": model, "temperature": 0, "ignore_eos": True, "stream": True, **(more or {})}
        self._body["stream_options"] = {"include_usage": True}

    async def complete(self, prompt: Sequence[int], new: int) -> Turn:
        """`new` tokens after the prompt, greedy. Raises: PeerError on a status other than 200 and on a short answer."""
        turn = Turn(time.perf_counter())
        try:
            async with asyncio.timeout(TIMEOUT):
                await self._stream({**self._body, "prompt": list(prompt), "max_tokens": new}, turn)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            raise PeerError(f"{self.name}, port {self.port}: {type(error).__name__}: {error}") from error
        if len(turn.tokens) != new:
            raise PeerError(f"{self.name} was asked for {new} tokens and gave {len(turn.tokens)}: {turn.text[:200]!r}")
        return turn

    async def _stream(self, body: dict[str, Any], turn: Turn) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=_LIMIT)
        try:
            data = json.dumps(body).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + data)
            await writer.drain()
            status, headers = await _head(reader)
            if status != 200:
                said = b" ".join([line async for line in _lines(reader, headers)])
                raise PeerError(f"{self.name} answers {status}: {said[:2000].decode(errors='replace')}")
            async for line in _lines(reader, headers):
                if not line.startswith(b"data:"):
                    continue
                event = line[5:].strip()
                if event == b"[DONE]":
                    break
                self._take(turn, json.loads(event))
            turn.tokens = tokens_in(turn.text)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _take(self, turn: Turn, event: dict[str, Any]) -> None:
        if "error" in event:
            raise PeerError(f"{self.name} says: {json.dumps(event['error'])[:500]}")
        text = "".join(choice.get("text") or "" for choice in event.get("choices") or [])
        if text:
            now = time.perf_counter()
            turn.first = turn.first or now
            turn.last = now
            turn.text += text
        usage = event.get("usage") or {}
        turn.prompt_tokens = usage.get("prompt_tokens", turn.prompt_tokens)
        turn.tiers = usage.get("cached_tokens_details") or turn.tiers
        details = usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            turn.cached = details["cached_tokens"]


async def all_of(client: Client, prompts: Sequence[Sequence[int]], new: int, at_once: int) -> list[Turn]:
    """All prompts in order, so many at a time. The first failure ends them all."""
    gate = asyncio.Semaphore(at_once)

    async def one(prompt: Sequence[int]) -> Turn:
        async with gate:
            return await client.complete(prompt, new)

    return await together([one(prompt) for prompt in prompts])


async def together(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all. The first failure ends the others and is raised as it is, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in asked]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    status = int((await reader.readline()).split()[1])
    headers = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip().lower()
    return status, headers


async def _lines(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
    """Lines of a body that is chunked (RFC 9112, 7.1) or ends with the connection. A line may span chunks."""
    if headers.get(b"transfer-encoding") != b"chunked":
        while line := await reader.readline():
            yield line.strip()
        return
    rest = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        rest += (await reader.readexactly(size + 2))[:-2]
        *whole, rest = rest.split(b"\n")
        for line in whole:
            yield line.strip()
    if rest.strip():
        yield rest.strip()
