"""A model in this process, for programs: text and conversations in, text and vectors out."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from afterglow.config import EngineConfig
from afterglow.errors import ConfigError, RequestError
from afterglow.library.locate import find_model, model_name
from afterglow.library.text_reply import TextReply, generated
from afterglow.library.threads import set_up_threads
from afterglow.request import Completion, ContextWindow, Request, SamplingParams
from afterglow.text import Tokenizer
from afterglow.text.reasoning import choose_reasoning

if TYPE_CHECKING:
    from afterglow.engine.engine import Engine
    from afterglow.engine.kv_format import Progress
    from afterglow.memo.sequence_embedder import EmbedResult
    from afterglow.memo.texts import TextEmbedder

Message = Mapping[str, object]


class LanguageModel:
    """An engine with its tokenizer. `load_model` makes one; use it in a `with` block, or close it.

    Methods may be called from several threads; their requests run in one batch.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        """`engine` has been started."""
        self.engine = engine
        engine.grammars.use_tokenizer(tokenizer.serialized)
        self.tokenizer = tokenizer
        self.window = ContextWindow(engine.max_model_len)
        template = tokenizer.chat_template
        self._reasoning = choose_reasoning("auto", template.source if template else "", tokenizer.is_special)
        self._embedder: TextEmbedder | None = None

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel running requests, write KV that is only in memory to disk, and release the cache directory."""
        self.engine.close(flush=True)

    def generate(
        self,
        prompts: str | Request | Sequence[str | Request],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] | None = (),
    ) -> list[Completion]:
        """Continue prompts, all in one batch, and return the replies in order.

        `sampling` is for prompts that are text: a `Request` has its own. `stop`: a string that ends a reply, and is left
        out of its text, or several. Raises: RequestError.
        """
        given = [prompts] if isinstance(prompts, str | Request) else [*prompts]
        for prompt in given:
            if not isinstance(prompt, str | Request):
                raise RequestError(f"a prompt must be text or a Request, got {prompt!r}; token ids go into a Request")
        replies = [self.stream(prompt, sampling, stop=stop) for prompt in given]
        deque(generated(self.engine, replies), maxlen=0)
        return [reply.completion for reply in replies]

    def stream(
        self, prompt: str | Request, sampling: SamplingParams | None = None, *, stop: str | Sequence[str] | None = ()
    ) -> TextReply:
        """Continue a prompt; iterate over the result for the text as it is generated. Raises: RequestError."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
            prompt = Request(uuid.uuid4().hex, ids, self._fitted(sampling or SamplingParams(), len(ids)))
        return TextReply(self.engine, self.tokenizer, prompt, stop)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] | None = (),
        salt: str = "",
        session_id: str | None = None,
        truncation: bool = False,
        continue_final_message: bool = False,
    ) -> Completion:
        """Answer a conversation, given as messages with `role` and `content`. A model that thinks does so in `reasoning`, and a
        grammar holds for what follows.

        `salt`: cached tokens are only found under equal salts. `session_id`: a name under which the conversation can be
        listed, pinned and deleted. `truncation`: leave out the oldest turns of a conversation that outgrows the context.
        `continue_final_message`: the last message is the assistant's, and the reply continues it. Raises: RequestError.
        """
        reply = self.stream_chat(
            messages,
            sampling,
            stop=stop,
            salt=salt,
            session_id=session_id,
            truncation=truncation,
            continue_final_message=continue_final_message,
        )
        deque(reply, maxlen=0)
        return reply.completion

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] | None = (),
        salt: str = "",
        session_id: str | None = None,
        truncation: bool = False,
        continue_final_message: bool = False,
    ) -> TextReply:
        """Answer a conversation as `chat` does; iterate over the result for the text as it is generated.

        Raises: RequestError.
        """
        sampling = sampling or SamplingParams()
        prompt = self.tokenizer.encode_chat(
            messages,
            salt=salt,
            continue_final_message=continue_final_message,
            cut_over=self.window.longest(sampling.max_tokens) if truncation else None,
            window=None if truncation else self.window,
        )
        if sampling.grammar is not None and self._reasoning is not None:
            mark, begun = self.tokenizer.in_grammar, prompt.beginning
            before = self._reasoning.before_grammar(prompt.text, mark, headed=False, beginning=begun)
            sampling = replace(sampling, grammar=replace(sampling.grammar, before=before))
        request = Request(
            uuid.uuid4().hex,
            prompt.ids,
            sampling if truncation else self._fitted(sampling, len(prompt.ids)),
            salt=salt,
            session_id=session_id,
            truncation=truncation,
            turns=prompt.turns,
        )
        return TextReply(self.engine, self.tokenizer, request, stop, prompt, self._reasoning)

    def embed(self, texts: str | Sequence[str], *, truncate: int | None = None) -> EmbedResult:
        """Embed texts with this model: `vectors`, float32 (texts, dimensions), of unit length. Of a text whose tokens are more than
        `truncate` the end is left out. Raises: RequestError."""
        given = [texts] if isinstance(texts, str) else list(texts)
        if truncate is not None and not isinstance(truncate, int):
            raise RequestError(f"truncate must be a whole number, or None, got {truncate!r}", param="truncate")
        for index, text in enumerate(given):
            if not isinstance(text, str) or not text:
                raise RequestError(f"texts[{index}] must be a text that is not empty, got {text!r}", param="texts")
        if self._embedder is None:
            from afterglow.memo.texts import text_embedder

            engine = self.engine
            self._embedder = text_embedder(engine.decoder, engine.model_dir, self.tokenizer, engine.model_name)
        return self._embedder.embed(given, truncate)

    def _fitted(self, sampling: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """Shorten the reply to what the context has room for. Raises: RequestError."""
        self.window.refuse(prompt_tokens)
        return replace(sampling, max_tokens=min(sampling.max_tokens, self.window.room(prompt_tokens)))


def load_model(
    model: str | Path | None = None, config: EngineConfig | None = None, *, progress: Progress | None = None
) -> LanguageModel:
    """Load a model and open its cache: a Hugging Face directory, a GGUF file, or a model on the hub (`OWNER/NAME`, or
    `OWNER/NAME:FILE.gguf`), which is downloaded unless it was before.

    None is `smollm2-135m-instruct` where it is installed, else `afterglow-small`, which ships with Afterglow. `progress` is
    called with a stage, and with its bytes done and in total. Raises: ModelError, ConfigError.
    """
    config = EngineConfig() if config is None else config
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config must be an EngineConfig, got {config!r}; a CacheConfig is its field `cache`")
    folder = find_model(model)
    set_up_threads(config.threads)
    tokenizer = Tokenizer(folder)
    from afterglow.engine.engine import Engine

    engine = Engine.load(folder, config, progress, name=model_name(model, folder))
    engine.start()
    return LanguageModel(engine, tokenizer)
