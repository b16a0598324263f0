"""A fake engine for tests of the server: right interface, no model.

It answers with the tokens of a fixed text, one per step, and remembers prompts per salt so that "cached"
tokens are honest: the longest common prefix with the prompts and replies before, reported as `host`. Where a prompt is too
long and may be truncated it leaves out the oldest turns, or, if it was told of none, tokens.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.grammars.compiler import Grammars
from afterglow.engine.requests import owner_of
from afterglow.engine.stats import EngineStats, TierBytes, Tiers
from afterglow.errors import RequestError
from afterglow.listings import PrefixInfo, SessionInfo
from afterglow.plan.prefix.salts import covers, everything_of, salt_name
from afterglow.plan.stats import Stats
from afterglow.request import CachedTokens, FinishReason, Output, Request, TokenLogprob, Truncation
from afterglow.store.database.conversations import Conversations

Sink = Callable[[Output], None]


@dataclass
class Live:
    request: Request
    sink: Sink
    prompt: list[int]  # after truncation
    cached: CachedTokens
    truncation: Truncation | None
    count: int = 0


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
        conversations: Conversations | None = None,
        cache: CacheConfig | None = None,
    ) -> None:
        self.model_dir = Path()
        self.reply = reply
        self.eos_token_ids = (eos,)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.step_seconds = step_seconds
        self.max_queue = max_queue
        self.grammars = Grammars(vocab_size, (eos,))
        self.config = EngineConfig(max_queue=max_queue, cache=cache or CacheConfig())
        self.shared_ids = None
        self.gate = threading.Event()  # requests wait until it is set
        if not hold:
            self.gate.set()
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.expected: list[list[Request]] = []
        self.resets: list[str | None] = []
        self.conversations = conversations or Conversations(None)
        self.named: dict[tuple[str, str], SessionInfo] = {}
        self.registering = False  # a registration has begun
        self.prefix_ids: dict[tuple[str, str], list[int]] = {}
        self.registered: dict[tuple[str, str], PrefixInfo] = {}  # by owner and name
        self.fail: str | None = None  # the error that ends the next request
        self.closed: bool | None = None
        self.healthy = True
        self._known: dict[str, list[list[int]]] = {}
        self._live: dict[str, Live] = {}
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

    def expect(self, prompts: Sequence[Request], after: str | None = None) -> None:
        self.expected.append(list(prompts))

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def stats(self) -> EngineStats:
        plan = Stats(running=len(self._live), waiting=self._inbox.qsize())
        return EngineStats(plan=plan, tiers=Tiers(device=TierBytes(capacity=100)))

    def reset_cache(self, salt: str | None = None, *, tenant: str | None = None) -> None:
        self.resets.append(f"{tenant}/*" if tenant is not None else salt)
        whose = everything_of(tenant) if tenant is not None else None if salt is None else salt_name(salt)
        for known in [known for known in self._known if covers(whose, salt_name(known))]:
            del self._known[known]
        for key in [key for key in self.named if covers(whose, salt_name(key[0]))]:
            del self.named[key]

    def sessions(self, salt: str) -> list[SessionInfo]:
        return [info for (owner, _), info in self.named.items() if owner == salt]

    def forget_session(self, salt: str, name: str) -> bool:
        return self.named.pop((salt, name), None) is not None

    def pin_session(self, salt: str, name: str, pinned: bool) -> bool:
        info = self.named.get((salt, name))
        if info is not None:
            self.named[salt, name] = replace(info, pinned=pinned)
        return info is not None

    def register_prefix(
        self, name: str, tokens: Sequence[int], *, salt: str | None = "", about: str = ""
    ) -> PrefixInfo:
        self.registering = True
        self.gate.wait()
        self.prefix_ids[owner_of(salt), name] = list(tokens)
        info = PrefixInfo(name, len(tokens), 0, len(tokens), 0, salt is None, 0, about)
        self.registered[owner_of(salt), name] = info
        return info

    def forget_prefix(self, name: str, *, salt: str | None = "") -> bool:
        return self.registered.pop((owner_of(salt), name), None) is not None

    def prefixes(self, salt: str | None = "") -> list[PrefixInfo]:
        return self.all_prefixes().get(owner_of(salt), [])

    def all_prefixes(self) -> dict[str, list[PrefixInfo]]:
        found: dict[str, list[PrefixInfo]] = {}
        for (owner, _), info in self.registered.items():
            found.setdefault(owner, []).append(info)
        return found

    def close(self, flush: bool = True) -> None:
        self.closed = flush
        self._inbox.put(None)
        self._thread.join(5)
        self.conversations.close()

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
                    self._live.pop(request_id).sink(Output(request_id, (), "cancelled"))
                elif self.gate.is_set():
                    self._step(request_id)

    def _admit(self, request: Request, sink: Sink) -> None:
        if self.fail is not None:
            error, self.fail = self.fail, None
            sink(Output(request.id, (), "error", error=error))
            return
        prompt, truncation = self._truncate(request)
        known = max((_common(prompt, other) for other in self._known.get(request.salt, ())), default=0)
        cached = CachedTokens(host=min(known, len(prompt) - 1))
        if truncation is not None:
            truncation = replace(truncation, reused=cached.total > 0)
        self._live[request.id] = Live(request, sink, prompt, cached, truncation)

    def _truncate(self, request: Request) -> tuple[list[int], Truncation | None]:
        prompt, limit = list(request.prompt), self.max_model_len
        if not request.truncation or len(prompt) + min(request.sampling.max_tokens, limit // 8) <= limit:
            return prompt, None
        head = request.turns[0] if request.turns else 0
        last = len(prompt) - (limit // 2 - head)
        start = next((row for row in request.turns[1:] if row >= last), last if len(request.turns) < 2 else 0)
        start = start or request.turns[-1]
        prompt = prompt[:head] + prompt[start:]
        return prompt, Truncation(start - head, len(prompt), reused=False)

    def _step(self, request_id: str) -> None:
        live = self._live[request_id]
        sampling, count = live.request.sampling, live.count
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
            elif count + 1 >= sampling.max_tokens or len(live.prompt) + count + 1 >= self.max_model_len:
                finish = "length"
        logprobs = ()
        if sampling.logprobs is not None:
            logprobs = tuple(_logprob(t, sampling.logprobs) for t in tokens)
        echo: tuple[TokenLogprob | None, ...] = ()
        if sampling.prompt_logprobs is not None and count == 0:
            echo = (None, *(_logprob(t, sampling.prompt_logprobs) for t in live.prompt[1:]))
        live.count += 1
        if finish is not None:
            del self._live[request_id]
            self._remember(live, count)
        live.sink(Output(request_id, tokens, finish, live.cached, logprobs, echo, live.truncation))

    def _remember(self, live: Live, count: int) -> None:
        request = live.request
        rows = [*live.prompt, *self.reply[:count]]
        self._known.setdefault(request.salt, []).append(rows)
        if (name := request.session_id) is not None:
            expires = None if request.ttl_s is None else 1000.0 + request.ttl_s
            pinned = (request.salt, name) in self.named and self.named[request.salt, name].pinned
            self.named[request.salt, name] = SessionInfo(name, len(rows), 0, len(rows), 0, 1000.0, expires, pinned)


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _logprob(token: int, count: int) -> TokenLogprob:
    top = tuple((token if i == 0 else i, -0.5 - i) for i in range(count))
    return TokenLogprob(token, -0.5, 1, top)
