"""The parts of one server, which all routes share, and the model names that requests may give."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest

from afterglow.errors import RequestError
from afterglow.library.sampling_defaults import SamplingDefaults
from afterglow.request import ContextWindow
from afterglow.server.blocking import TextThreads
from afterglow.server.bodies.reader import BodyReader
from afterglow.server.bodies.tool_fields import ToolUse
from afterglow.server.bridge import Bridge, EngineLike
from afterglow.server.embedding_models import EmbeddingModels, EncoderOnly
from afterglow.server.metrics.collector import Metrics
from afterglow.server.metrics.trace_recorder import TraceRecorder
from afterglow.server.prompts.kept_replies import KeptReplies
from afterglow.server.prompts.system_prompts import SystemPrompts
from afterglow.server.server_config import ServerConfig
from afterglow.server.tenants import RequestRecord, Tenants
from afterglow.text import ChatPrompt, Tokenizer
from afterglow.text.chat_template import shown
from afterglow.text.reasoning import Splitter, choose_reasoning
from afterglow.text.tool_calls.formats import choose_format
from afterglow.text.tool_calls.harmony import HarmonyParser
from afterglow.text.tool_calls.parts import ReplyParser

if TYPE_CHECKING:
    from afterglow.memo.texts import TextEmbedder
    from afterglow.server.shared_names import SharedNames


class ServedModels:
    """The names of the model that generates, and the names of models that only embed."""

    def __init__(self, names: Sequence[str], generates: bool, embedding: Container[str]) -> None:
        """`generates`: False where the model called `names` is an encoder. `embedding`: names of models that embed."""
        self.names = names
        self.generates = generates
        self._embedding = embedding

    def check(self, name: str | None, *, generate: bool = True) -> str:
        """Return the name of the model that a request means; without a name the default.

        Raises: RequestError, status 404, for an unknown model, and for one that only embeds where `generate` is set.
        """
        if name is None:
            name = self.names[0]
        if generate and name in self._embedding and not (self.generates and name in self.names):
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


class State:
    """Composes a server from its engine, its tokenizer and its configuration."""

    def __init__(
        self,
        engine: EngineLike,
        tokenizer: Tokenizer,
        config: ServerConfig,
        defaults: SamplingDefaults,
        embedders: Sequence[TextEmbedder] = (),
    ) -> None:
        """`embedders`: the models of `/v1/embeddings`, the default first."""
        self.engine = engine
        engine.grammars.use_tokenizer(tokenizer.serialized)
        self.tokenizer = tokenizer
        self.config = config
        self.defaults = defaults
        self.created = int(time.time())
        names = config.served_model_name or (engine.model_name,)
        self.tenants = Tenants(config.api_key, config.admin_key, config.metrics_key, config.urgent_key)
        self.bodies = BodyReader(config.max_body)
        self.text_threads = TextThreads()
        self.metrics = Metrics(engine, tokenizer, names[0], engine.max_model_len)
        self.embeddings = EmbeddingModels(embedders, names, engine, self.metrics.registry)
        self.models = ServedModels(names, not isinstance(engine, EncoderOnly), self.embeddings.names)
        self.window = ContextWindow(engine.max_model_len)
        self.system_prompts = SystemPrompts(engine, tokenizer, config.system_prompt_mode)
        self.warned_uncut = False  # that the chat template shows no places to cut at
        self.bridge = Bridge(engine)
        template = tokenizer.chat_template
        self.tool_format = choose_format(
            config.tool_call_parser,
            template.source if template is not None else "",
            tokenizer.response_template,
            own=template is not None and template.writes_tools,
        )

        self.reasoning = choose_reasoning(
            config.reasoning_parser, template.source if template is not None else "", tokenizer.is_special
        )

        self.kept_replies = KeptReplies(engine, tokenizer, expects=self.reasoning is not None)
        self.shared_names = self._share_names()

    def _share_names(self) -> SharedNames | None:
        """Make what servers share of names; None, and nothing imported, where they share nothing."""
        ids = self.engine.shared_ids
        if ids is None:
            return None
        from afterglow.server.shared_names import SharedNames

        return SharedNames(ids, self.engine, self.system_prompts, self.tokenizer)

    def splitter(self, use: ToolUse, chat: ChatPrompt | None) -> Splitter | None:
        """Make what finds the reasoning in one reply; None where there is none, or where the parser of calls finds it."""
        if self.reasoning is None or chat is None or (use.parsed and self.tool_format.name == "response_template"):
            return None
        return self.reasoning.splitter(chat.text, chat.beginning)

    def tool_parser(self, use: ToolUse, chat: ChatPrompt | None) -> ReplyParser | None:
        """Make the parser for one reply; None where there is nothing to look for in the text."""
        channels = chat is not None and self.reasoning is not None and self.reasoning.name == "openai"
        if not use.parsed:
            return HarmonyParser({}) if channels else None
        # What the text before a begun reply opens, the reply's beginning may have closed.
        prompt = chat.text if chat is not None and not chat.beginning else ""
        return self.tool_format.parser(use.schemas, prompt, one_call=not use.parallel)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the parts that work beside requests, on the running event loop, and end them."""
        path = self.config.record_trace
        recorder = TraceRecorder(path) if path is not None else None
        self.bridge.start(recorder)
        worker = self.embeddings.worker
        if worker is not None:
            worker.start()
        if self.shared_names is not None:
            loop = asyncio.get_running_loop()
            self.shared_names.start(lambda: _soon(loop, self.kept_replies.forget_turns))
        sweeping = asyncio.create_task(self.kept_replies.sweep())
        yield
        sweeping.cancel()
        if self.shared_names is not None:
            await asyncio.to_thread(self.shared_names.close)
        if worker is not None:
            await asyncio.to_thread(worker.close)
        self.bodies.close()
        self.text_threads.close()
        self.kept_replies.close()
        await self.bridge.aclose()
        if recorder is not None:
            await asyncio.to_thread(recorder.close)


def state_and_record(http: HttpRequest) -> tuple[State, RequestRecord]:
    """Return the state of the server that got a request, and the request's record."""
    return http.scope["afterglow.state"], http.scope["afterglow.record"]


def _soon(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    """Do something on an event loop, from any thread; nothing if the loop has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(work)
