"""What all routes share, and the steps from a body to the engine's requests."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from afterglow.errors import RequestError
from afterglow.request import CachedTokens, Request, SamplingParams
from afterglow.server.assemble import Assembler, Piece
from afterglow.server.jobs import Choice, EngineLike, Group, Jobs
from afterglow.server.metrics import Metrics
from afterglow.server.schema import Body, Defaults
from afterglow.server.settings import ServerConfig
from afterglow.text import Tokenizer

T = TypeVar("T")
THREAD_CHARS = 16 * 1024  # tokenising this much takes a few milliseconds; more would hold up other streams


@dataclass(slots=True)
class Record:
    """One HTTP request, for its line in the log and for the metrics."""

    began: float = field(default_factory=time.perf_counter)
    request_id: str = ""
    tenant: str = ""  # identifies the API key without being it
    prompt_tokens: int | None = None  # None: it asked for no tokens
    cached: CachedTokens = field(default_factory=CachedTokens)
    generated: int = 0
    ttft: float | None = None
    last_token: float = 0.0


class Tenants:
    """API keys, and what they make of a request's salt."""

    def __init__(self, keys: Sequence[str]) -> None:
        # A slow hash, once per key: the identifier ends up in cache ids and must not give the key away.
        self._keys = [(hashlib.sha256(k.encode()).digest(), _slow_id(k)) for k in dict.fromkeys(keys)]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def identify(self, authorization: str) -> str | None:
        """The tenant of an Authorization header; None for a wrong key. All keys are compared, in constant
        time."""
        scheme, _, key = authorization.partition(" ")
        offered = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for digest, tenant in self._keys:
            if hmac.compare_digest(digest, offered):
                found = tenant
        return found if scheme.lower() == "bearer" else None


def _slow_id(key: str) -> str:
    return hashlib.scrypt(key.encode(), salt=b"afterglow tenant", n=2**12, r=8, p=1, dklen=16).hex()


def salt_of(tenant: str, cache_salt: str | None) -> str:
    """Under which KV is shared: the key's owner and the client's salt, neither can reach into the other."""
    return f"{tenant}/{cache_salt or ''}" if tenant or cache_salt else ""


class State:
    """The server's constants, and its jobs once the loop runs."""

    jobs: Jobs

    def __init__(self, engine: EngineLike, tokenizer: Tokenizer, config: ServerConfig, defaults: Defaults) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.names = config.served_model_name or (engine.model_name,)
        self.defaults = defaults
        self.tenants = Tenants(config.api_key)
        self.created = int(time.time())
        self.metrics = Metrics(engine, tokenizer, self.names[0])

    def check_model(self, name: str | None) -> str:
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise RequestError(
                f"the model {name!r} does not exist; this server has {', '.join(self.names)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return name

    def room_for(self, prompt: Sequence[int], max_tokens: int | None, default: int | None, param: str) -> int:
        """How many tokens may be generated. Errors: RequestError, if prompt and reply do not fit the
        context."""
        limit, size = self.engine.max_model_len, len(prompt)
        wish = f"this model's maximum context length is {limit} tokens"
        code = "context_length_exceeded"
        if size == 0:
            raise RequestError("the prompt is empty", param=param)
        if size + min(1, max_tokens if max_tokens is not None else 1) > limit:
            raise RequestError(f"{wish}, but the prompt has {size} tokens", param=param, code=code)
        if max_tokens is not None:
            if size + max_tokens > limit:
                raise RequestError(
                    f"{wish}, but {size + max_tokens} were asked for: {size} in the prompt and {max_tokens} "
                    "for the reply",
                    param="max_tokens",
                    code=code,
                )
            return max_tokens
        room = limit - size
        if self.defaults.max_new_tokens is not None:
            default = min(self.defaults.max_new_tokens, default or room)
        return room if default is None else min(room, default)

    async def tokenise(self, size: int, work: Callable[[], T]) -> T:
        """Tokenise `size` characters: here if that is quick, else in a thread, so that streams go on."""
        return work() if size <= THREAD_CHARS else await asyncio.to_thread(work)

    def choices(
        self,
        http: HttpRequest,
        body: Body,
        prompts: Sequence[tuple[Sequence[int], SamplingParams]],
        salt: str,
    ) -> list[Choice]:
        """n replies for each prompt, prompt by prompt."""
        session = body.session_id or http.headers.get("x-session-id") or None
        if session is not None and salt:
            session = f"{salt}/{session}"  # a session's name is its tenant's own
        made = []
        for ids, sampling in prompts:
            for number in range(body.n or 1):
                if sampling.seed is not None and number:
                    sampling = replace(sampling, seed=(sampling.seed + 1) % 2**63)
                request = Request(
                    id=uuid.uuid4().hex,
                    prompt=list(ids),
                    sampling=sampling,
                    salt=salt,
                    session_id=session,
                    priority=body.priority or 0,
                )
                assembler = Assembler(
                    self.tokenizer,
                    ids,
                    body.stops,
                    include_stop=body.include_stop_str_in_output,
                    skip_special_tokens=body.skip_special_tokens,
                )
                made.append(Choice(request, assembler))
        return made


class Run:
    """The replies of one HTTP request on their way, with their accounts."""

    def __init__(self, state: State, record: Record, choices: Sequence[Choice], per_prompt: int) -> None:
        self.choices = choices
        self._per_prompt = per_prompt
        self._metrics = state.metrics
        self._record = record
        record.prompt_tokens = sum(len(c.request.prompt) for c in choices[::per_prompt])
        self._group: Group = state.jobs.start(choices)

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """What arrives, choice by choice. Jobs end with the iteration, however it ends: close it."""
        record = self._record
        try:
            async for index, piece in self._group.pieces():
                now = time.perf_counter()
                if piece.tokens:
                    if record.ttft is None:
                        record.ttft = now - record.began
                    elif len(self.choices) == 1:
                        self._metrics.inter_token.observe((now - record.last_token) / len(piece.tokens))
                    record.last_token = now
                    record.generated += len(piece.tokens)
                record.cached = self.cached
                yield index, piece
        finally:
            self.close()

    def close(self) -> None:
        """Cancel what still runs. Idempotent."""
        self._group.close()

    @property
    def cached(self) -> CachedTokens:
        """By tier. Further replies to a prompt find all of it cached by the first: they do not count."""
        found = [c.assembler.cached for c in self.choices[:: self._per_prompt]]
        return CachedTokens(*(sum(getattr(c, tier) for c in found) for tier in ("device", "host", "disk")))

    def usage(self) -> dict[str, Any]:
        prompt = self._record.prompt_tokens or 0
        cached = self.cached
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._record.generated,
            "total_tokens": prompt + self._record.generated,
            "prompt_tokens_details": {"cached_tokens": cached.total},
            "cached_tokens_details": {"device": cached.device, "host": cached.host, "disk": cached.disk},
        }
