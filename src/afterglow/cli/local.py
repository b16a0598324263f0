"""A model in this process, for `generate` and `chat`: an engine, a tokenizer, and a loop over pieces of
text."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from afterglow.cli.environment import find_model, model_name, set_up_threads
from afterglow.cli.progress import progress
from afterglow.config import EngineConfig
from afterglow.errors import RequestError
from afterglow.request import CachedTokens, Output, Request, SamplingParams
from afterglow.server.assemble import Assembler
from afterglow.text import ChatPrompt, Tokenizer

if TYPE_CHECKING:
    from afterglow.engine.engine import Engine


class Turn:
    """One reply on its way: iterate over it for the text; the rest is known afterwards."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, request: Request, stops: Sequence[str] = ()) -> None:
        self._engine = engine
        self._request = request
        self._assembler = Assembler(tokenizer, request.prompt, stops)
        self.prompt_tokens = len(request.prompt)
        self.ttft_s: float | None = None

    @property
    def text(self) -> str:
        return self._assembler.text

    @property
    def cut_off(self) -> bool:
        """Did it end because it was long enough?"""
        return self._assembler.finish == "length"

    @property
    def tokens(self) -> list[int]:
        return self._assembler.tokens

    @property
    def cached(self) -> CachedTokens:
        return self._assembler.cached

    def __iter__(self) -> Iterator[str]:
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        began = time.perf_counter()
        self._engine.submit(self._request, outputs.put)
        try:
            while self._assembler.finish is None:
                try:
                    # A wait without end could not be interrupted, nor notice that the engine has died.
                    output = outputs.get(timeout=0.5)
                except queue.Empty:
                    if not self._engine.healthy:
                        raise RequestError("the engine has stopped because of an internal error") from None
                    continue
                if self.ttft_s is None and output.tokens:
                    self.ttft_s = time.perf_counter() - began
                if piece := self._assembler.feed(output).text:
                    yield piece
        finally:
            self._engine.cancel(self._request.id)


class Local:
    """An engine in this process."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer

    def turn(
        self, ids: Sequence[int], max_tokens: int | None, sampling: dict[str, Any], stops: Sequence[str] = ()
    ) -> Turn:
        limit = self.engine.max_model_len
        if len(ids) >= limit:
            raise RequestError(f"the context is {limit} tokens, and the prompt alone has {len(ids)}")
        room = limit - len(ids)
        params = SamplingParams(max_tokens=room if max_tokens is None else min(max_tokens, room), **sampling)
        return Turn(self.engine, self.tokenizer, Request(uuid.uuid4().hex, list(ids), params), stops)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> ChatPrompt:
        return self.tokenizer.encode_chat(messages)


@contextmanager
def open_local(model: str | None, config: EngineConfig) -> Iterator[Local]:
    """Load a model; at the end its KV goes to disk, so that the next run starts where this one ended."""
    folder = find_model(model)
    set_up_threads(config.threads)
    tokenizer = Tokenizer(folder)
    from afterglow.engine.engine import Engine

    with progress() as report:
        engine = Engine.load(folder, config, report, name=model_name(model, folder.resolve()))
    engine.start()
    try:
        yield Local(engine, tokenizer)
    finally:
        engine.close(flush=True)


def summary(prompt_tokens: int, cached: CachedTokens, ttft_s: float | None) -> str:
    """`812 prompt tokens, 768 cached (device 512, host 256), first token after 35 ms`."""
    tiers = (("device", cached.device), ("host", cached.host), ("disk", cached.disk))
    found = ", ".join(f"{name} {count}" for name, count in tiers if count)
    line = f"{prompt_tokens} prompt tokens, {cached.total} cached{f' ({found})' if found else ''}"
    return line if ttft_s is None else f"{line}, first token after {ttft_s * 1e3:.0f} ms"
