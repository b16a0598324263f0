"""What all routes share, and the steps from a body to the engine's requests."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError, StoreError
from afterglow.request import CachedTokens, Request, SamplingParams
from afterglow.server.apart import FILES
from afterglow.server.assemble import Assembler
from afterglow.server.bodies import Bodies
from afterglow.server.defaults import Defaults
from afterglow.server.jobs import Choice, EngineLike, Jobs
from afterglow.server.metrics import Metrics
from afterglow.server.prompts import SystemPrompts
from afterglow.server.schema import Body, check_session
from afterglow.server.settings import ServerConfig
from afterglow.server.tenants import Caller, Tenants
from afterglow.server.wire import write_json
from afterglow.text import ChatPrompt, Reply, Tokenizer
from afterglow.text.chat import shown, texts_in
from afterglow.text.lengths import LONG
from afterglow.text.turns import TEMPLATE

if TYPE_CHECKING:
    from afterglow.server.embeddings import Embeddings

log = logging.getLogger("afterglow.server")
T = TypeVar("T")
TEXT_THREADS = 2  # that render and tokenise long inputs; others wait for their turn
SWEEP_SECONDS = 60.0
RESERVE = 8  # the part of the context that is kept free for a reply, see spec A12


@dataclass(frozen=True, slots=True)
class Wish:
    """How long a reply may be: `tokens` as asked for, `default` where it was not. With the names of the fields."""

    tokens: int | None
    prompt_field: str
    tokens_field: str = "max_tokens"
    default: int | None = None


@dataclass(slots=True)
class Record:
    """One HTTP request, for its line in the log and for the metrics."""

    began: float = field(default_factory=time.perf_counter)
    request_id: str = ""
    caller: Caller = field(default_factory=Caller)
    prompt_tokens: int | None = None  # None: it asked for no tokens
    cached: CachedTokens = field(default_factory=CachedTokens)
    generated: int = 0
    ttft: float | None = None
    last_token: float = 0.0
    per_token: list[float] = field(
        default_factory=list
    )  # of each reply, the mean seconds of its tokens after the first
    note: str = ""  # for the log
    large: bool = False  # its body was


class State:
    """The server's constants, and its jobs once the loop runs."""

    jobs: Jobs
    embeddings: Embeddings
    generates = True  # False: the only model is an encoder

    def __init__(self, engine: EngineLike, tokenizer: Tokenizer, config: ServerConfig, defaults: Defaults) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.names = config.served_model_name or (engine.model_name,)
        self.defaults = defaults
        self.tenants = Tenants(config.api_key, config.admin_key, config.metrics_key, config.urgent_key)
        self.created = int(time.time())
        self.bodies = Bodies(config.max_body)
        self._texts = ThreadPoolExecutor(TEXT_THREADS, "afterglow-text")
        self._said_uncut = False
        self.metrics = Metrics(engine, tokenizer, self.names[0], engine.max_model_len)
        self.prompts = SystemPrompts(engine, tokenizer, config.system_prompt_mode)

    def check_model(self, name: str | None, *, generate: bool = True) -> str:
        """Errors: RequestError, status 404, also for a model that only embeds where one shall `generate`."""
        if name is None:
            name = self.names[0]
        if generate and name in self.embeddings.names and not (self.generates and name in self.names):
            raise RequestError(
                f"{shown(name)} embeds texts and generates none; use it with /v1/embeddings or /v1/rerank",
                status=404,
                param="model",
                code="not_a_chat_model",
            )
        if name not in self.names:
            raise RequestError(
                f"the model {shown(name)} does not exist; this server has {', '.join(self.names)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return name

    def check_replies(self, count: int, param: str) -> None:
        """Errors: RequestError, if so many replies can never be queued at once: waiting would not help."""
        most = self.engine.config.max_queue
        if count > most:
            raise RequestError(
                f"{count} replies were asked for at once, and this server's queue holds {most} (--max-queue); "
                "ask for them in several requests",
                param=param,
            )

    def room_for(self, prompt: Sequence[int], wish: Wish, cut: bool = False) -> int:
        """How many tokens may be generated. `cut`: the engine may leave out the oldest of the prompt. Errors:
        RequestError, if prompt and reply do not fit the context."""
        limit, size, wanted = self.engine.max_model_len, len(prompt), wish.tokens
        most = f"this model's maximum context length is {limit} tokens"
        code = "context_length_exceeded"
        if size == 0:
            raise RequestError("the prompt is empty", param=wish.prompt_field)
        if cut:
            if wanted is not None and wanted >= limit:
                raise RequestError(
                    f"{most}, but {wanted} were asked for the reply alone", param=wish.tokens_field, code=code
                )
            room = self._wanted(wish)  # what remains is known when the engine has cut the prompt: it ends the reply
            return min(room, limit - size) if size <= self.longest_uncut(wish) else min(room, limit - 1)
        if size + min(1, wanted if wanted is not None else 1) > limit:
            raise RequestError(f"{most}, but the prompt has {size} tokens", param=wish.prompt_field, code=code)
        if wanted is not None and size + wanted > limit:
            raise RequestError(
                f"{most}, but {size + wanted} were asked for: {size} in the prompt and {wanted} for the reply",
                param=wish.tokens_field,
                code=code,
            )
        return min(self._wanted(wish), limit - size)

    def longest_uncut(self, wish: Wish) -> int:
        """Tokens of a prompt up to which nothing of it has to be left out: beyond it the engine begins to, so that a
        reply of an eighth of the context (or the shorter one that was asked for) has room."""
        limit, wanted = self.engine.max_model_len, self._wanted(wish)
        return limit - max(min(wanted, limit // RESERVE), min(1, wanted))

    def _wanted(self, wish: Wish) -> int:
        found = [n for n in (wish.default, self.defaults.max_new_tokens) if n is not None]
        return wish.tokens if wish.tokens is not None else min(found, default=self.engine.max_model_len)

    async def encode_chat(
        self,
        messages: Any,
        salt: str,
        variables: dict[str, Any] | None,
        wish: Wish,
        *,
        size: int,
        cut: bool,
        replies: Mapping[int, Reply] | None = None,
    ) -> ChatPrompt:
        """A conversation as a prompt, after the system prompt that is registered for it; with `cut`, and where it is too
        long, with its turns. `size`: how much work it is, in characters. Errors: RequestError."""

        def work() -> tuple[ChatPrompt, Any]:
            begun, known, registered = self.prompts.begin(messages, salt, replies)
            found = self.tokenizer.encode_chat(
                begun,
                salt=salt,
                variables=variables,
                replies=known,
                cut_over=self.longest_uncut(wish) if cut else None,
                limit=None if cut else self.engine.max_model_len,
            )
            return found, registered

        if size <= LONG:
            texts = (*texts_in(messages), *self.prompts.texts(salt))
            # A marker in a message may have to wait for another tokenizer, which is a matter of seconds once.
            waits = any(map(self.tokenizer.markers.mentioned_in, texts))
            size = LONG + 1 if waits else sum(map(len, texts))
        try:
            prompt, registered = await self.tokenise(size, work)
        except RequestError as error:
            if error.param == "messages":
                error.param = wish.prompt_field
            raise
        if prompt.uncut == TEMPLATE and not self._said_uncut:
            self._said_uncut = True
            log.warning("truncation: %s; the oldest tokens after the system prompt are left out instead", TEMPLATE)
        if registered is not None and not variables:
            self.prompts.used(registered, prompt.ids)
        return prompt

    async def tokenise(self, size: int, work: Callable[[], T]) -> T:
        """Tokenise `size` characters, or detokenise as many ids: here if that is quick, else in a thread, so that
        streams go on. Not in one of the loop's own threads, for which what is short would have to wait then."""
        return work() if size <= LONG else await asyncio.get_running_loop().run_in_executor(self._texts, work)

    async def respond(self, size: int, make: Callable[[], object]) -> Response:
        """What `make` returns, as JSON. `size`: about how many values, or ids, it has; much is made in a thread."""
        written = await self.tokenise(size, lambda: write_json(make()))
        return Response(written, media_type="application/json")

    def close(self) -> None:
        """End what runs beside the event loop."""
        self.bodies.close()
        self._texts.shutdown(wait=False, cancel_futures=True)

    def reply_ends(self, request: Request) -> float:
        """When the text of a reply is forgotten: when its KV is, if nobody goes on from it."""
        ttl = request.ttl_s if request.ttl_s is not None else self.engine.config.cache.ttl
        return time.time() + ttl if ttl is not None else inf

    def keep_reply(self, prompt: ChatPrompt, reply: Reply, request: Request, ends: float) -> None:
        """Keep the ids of a reply over restarts, where there is a disk tier; in a thread, for which nobody waits."""
        kept = self.engine.conversations
        before = [chain.hex() for chain in prompt.known]

        def work() -> None:
            body = {"text": reply.text, **reply.as_json()}
            try:
                kept.keep_reply(prompt.chain.hex(), prompt.salt, request.session_id, body, ends, before)
            except StoreError as error:
                log.warning("the ids of a reply are not kept: %s", error)

        if kept.folder is not None and request.reuse and not request.volatile:
            try:
                FILES.start(work)
            except RequestError as error:
                log.warning("the ids of a reply are not kept: %s", error)

    def load_replies(self) -> None:
        """Take over the replies that were kept before a restart."""
        try:
            for chain, salt, body, ends in self.engine.conversations.replies():
                self.tokenizer.replies.restore(bytes.fromhex(chain), salt, Reply.from_json(body["text"], body), ends)
        except StoreError as error:
            log.warning("the ids of earlier replies are lost: %s", error)

    async def sweep(self) -> None:
        """Forget the replies and the responses whose time has come, as long as the server runs."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.tokenizer.replies.sweep(time.time())
            try:
                await FILES(self.engine.conversations.sweep)
            except (StoreError, RequestError) as error:
                log.warning("what has expired of conversations is still there: %s", error)

    def session_of(self, http: HttpRequest, body: Body) -> str | None:
        """Errors: RequestError."""
        named = body.session_id or _header(http, "x-session-id")
        check_session(named)
        return named

    def choices(
        self,
        http: HttpRequest,
        body: Body,
        prompts: Sequence[tuple[Sequence[int], SamplingParams]],
        salt: str,
        *,
        n: int = 1,
        cut: bool = False,
        turns: tuple[int, ...] = (),
    ) -> list[Choice]:
        """n replies for each prompt, prompt by prompt."""
        record: Record = http.scope["afterglow.record"]
        record.caller.check_priority(body.priority or 0)
        session = self.session_of(http, body)
        cache_key = body.prompt_cache_key
        if cache_key is not None and salt:
            cache_key = f"{salt}/{cache_key}"  # what one tenant asks for must not wait for, or go before, another's
        made: list[Choice] = []
        for ids, sampling in prompts:
            prompt = list(ids)
            for number in range(n):
                if sampling.seed is not None and number:
                    sampling = replace(sampling, seed=(sampling.seed + 1) % 2**63)
                request = Request(
                    id=uuid.uuid4().hex,
                    prompt=prompt,
                    sampling=sampling,
                    salt=salt,
                    # A conversation has one turn at a time. Of several replies nobody knows which one goes on.
                    session_id=None if made else session,
                    priority=body.priority or 0,
                    cache_key=cache_key,
                    ttl_s=body.ttl_s,
                    volatile=body.volatile,
                    truncation=cut,
                    turns=turns,
                    kv_retention=body.kv_retention,
                )
                assembler = Assembler(
                    self.tokenizer,
                    ids,
                    body.stops,
                    include_stop=body.include_stop_str_in_output,
                    skip_special_tokens=body.skip_special_tokens,
                    min_tokens=sampling.min_tokens,
                )
                made.append(Choice(request, assembler))
        return made


def _header(http: HttpRequest, name: str) -> str | None:
    """A header that clients write in UTF-8, whatever HTTP says."""
    value = http.headers.get(name)
    try:
        return value.encode("latin-1").decode() if value else None
    except UnicodeError:
        return value
