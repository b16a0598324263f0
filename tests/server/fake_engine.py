"""A fake engine for tests of the server: right interface, no model.

It answers with the tokens of a fixed text, one per step, and remembers prompts per salt so that "cached"
tokens are honest: the longest common prefix with what was answered before, reported as `host`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from afterglow.engine.stats import EngineStats
from afterglow.errors import RequestError
from afterglow.request import CachedTokens, FinishReason, Output, Request, TokenLogprob

Sink = Callable[[Output], None]


class FakeEngine:
    model_name = "fake-model"
    eos_token_ids: tuple[int, ...]

    def __init__(
        self,
        reply: list[int],
        *,
        eos: int,
        vocab_size: int = 400,
        max_model_len: int = 512,
        max_queue: int = 64,
        step_seconds: float = 0.0,
        hold: bool = False,
    ) -> None:
        self.model_dir = Path()
        self.reply = reply
        self.eos_token_ids = (eos,)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.step_seconds = step_seconds
        self.max_queue = max_queue
        self.gate = threading.Event()  # requests wait until it is set
        if not hold:
            self.gate.set()
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.resets = 0
        self.closed: bool | None = None
        self.healthy = True
        self._known: dict[str, list[list[int]]] = {}
        self._live: dict[str, tuple[Request, Sink, int, CachedTokens]] = {}
        self._inbox: queue.SimpleQueue[tuple[Request, Sink] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def in_flight(self) -> int:
        return len(self._live) + self._inbox.qsize()

    def submit(self, request: Request, sink: Sink) -> None:
        if self.in_flight >= self.max_queue:
            raise RequestError("too many requests are waiting", status=429, code="queue_full")
        self.requests.append(request)
        self._inbox.put((request, sink))

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._live), waiting=self._inbox.qsize(), device_capacity_bytes=100)

    def reset_cache(self) -> None:
        self.resets += 1
        self._known.clear()

    def close(self, flush: bool = True) -> None:
        self.closed = flush
        self._inbox.put(None)
        self._thread.join(5)

    def die(self) -> None:
        self.healthy = False
        self.close()

    def _main(self) -> None:
        while True:
            self.gate.wait(0.02)
            try:
                entry = self._inbox.get(timeout=None if not self._live and self.gate.is_set() else 0.001)
                if entry is None:
                    return
                self._admit(*entry)
            except queue.Empty:
                pass
            if self._live and self.step_seconds:
                time.sleep(self.step_seconds)
            for request_id in list(self._live):
                if request_id in self.cancelled:
                    _, sink, *_ = self._live.pop(request_id)
                    sink(Output(request_id, (), "cancelled"))
                elif self.gate.is_set():
                    self._step(request_id)

    def _admit(self, request: Request, sink: Sink) -> None:
        prompt = list(request.prompt)
        known = max((_common(prompt, other) for other in self._known.get(request.salt, ())), default=0)
        cached = CachedTokens(host=min(known, len(prompt) - 1))
        self._live[request.id] = (request, sink, 0, cached)

    def _step(self, request_id: str) -> None:
        request, sink, count, cached = self._live[request_id]
        sampling = request.sampling
        tokens: tuple[int, ...] = ()
        finish: FinishReason | None = None
        if sampling.max_tokens == 0:
            finish = "length"
        else:
            done = count >= len(self.reply) and not sampling.ignore_eos
            token = self.eos_token_ids[0] if done else self.reply[count % len(self.reply)]
            tokens = (token,)
            if token in (*self.eos_token_ids, *sampling.stop_token_ids) and not sampling.ignore_eos:
                finish = "stop"
            elif count + 1 >= sampling.max_tokens:
                finish = "length"
        logprobs = ()
        if sampling.logprobs is not None:
            logprobs = tuple(_logprob(t, sampling.logprobs) for t in tokens)
        echo: tuple[TokenLogprob | None, ...] = ()
        if sampling.prompt_logprobs is not None and count == 0:
            echo = (None, *(_logprob(t, sampling.prompt_logprobs) for t in request.prompt[1:]))
        self._live[request_id] = (request, sink, count + 1, cached)
        if finish is not None:
            del self._live[request_id]
            self._known.setdefault(request.salt, []).append([*request.prompt, *self.reply[:count]])
        sink(Output(request_id, tokens, finish, cached, logprobs, echo))


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _logprob(token: int, count: int) -> TokenLogprob:
    top = tuple((token if i == 0 else i, -0.5 - i) for i in range(count))
    return TokenLogprob(token, -0.5, 1, top)
