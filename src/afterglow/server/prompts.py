"""System prompts that are registered: what stands for the system message of requests that bring none, computed before
anybody asks (RelayAttention §3). The operator's is everybody's; a tenant's goes before it, and is the tenant's alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from afterglow.engine.prefixes import owner_of
from afterglow.errors import ConfigError, RequestError
from afterglow.plan.salts import covers, everything_of
from afterglow.request import PrefixInfo
from afterglow.server.apart import PROMPTS
from afterglow.server.jobs import EngineLike
from afterglow.server.settings import SystemPromptMode
from afterglow.text import Reply, Tokenizer, flatten_messages
from afterglow.text.prefix import system_prefix

log = logging.getLogger("afterglow.server")

DEFAULT = "default"  # the name of a tenant's prompt that is put before its requests; others are only kept
OPERATORS = "system-prompt"
AGAIN_SECONDS = 60.0  # between attempts to register a prompt whose tokens have changed (a date in the template)
SYSTEM_ROLES = ("system", "developer")


@dataclass(slots=True)
class _Prompt:
    """`ids`: with which requests begin; None: not known in this process yet. `salt`: None is the operator's; a tenant's
    is known when its first request comes."""

    text: str
    salt: str | None
    name: str
    ids: list[int] | None = None
    tried: float = field(default=float("-inf"))


class SystemPrompts:
    """The prompts of one server, by tenant."""

    def __init__(self, engine: EngineLike, tokenizer: Tokenizer, mode: SystemPromptMode) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._always = mode == "always"
        self._operators: _Prompt | None = None
        self._own: dict[str, _Prompt] = {}  # the tenants', by the plan's name of the salt
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------------ registering

    def start(self, text: str | None) -> None:
        """Take over what tenants have registered before a restart. Compute the operator's prompt, or load it; end an
        earlier one. Waits. Errors: ConfigError."""
        if self._engine.config.cache.reuse:
            known = self._engine.all_prefixes()
            for owner, found in known.items():
                for info in found:
                    if info.name == DEFAULT and info.about:
                        self._own[owner] = _Prompt(str(json.loads(info.about)["text"]), "", DEFAULT)
            if text is None and owner_of(None) in known:
                self._engine.forget_prefix(OPERATORS, salt=None)
        if text is None:
            return
        began = time.perf_counter()
        prompt = _Prompt(text, None, OPERATORS)
        try:
            done = self._register(prompt)
        except RequestError as error:
            raise ConfigError(f"--system-prompt-file: {error}") from None
        self._operators = prompt
        if done is not None:
            log.info(
                "the system prompt's %d tokens are there after %.1f s, %d of them from the cache",
                done.tokens, time.perf_counter() - began, done.cached,
            )  # fmt: skip

    def register(self, salt: str, name: str, text: str) -> PrefixInfo:
        """Compute a tenant's prompt and keep it. Waits. Errors: RequestError."""
        text = text.strip()
        if not text:
            raise RequestError("text must not be empty", param="text")
        prompt = _Prompt(text, salt, name)
        found = self._register(prompt)
        if found is None:
            raise RequestError("nothing is kept with --no-reuse, so no prompt can be registered")
        if name == DEFAULT:
            self._own[owner_of(salt)] = prompt
        return found

    def _register(self, prompt: _Prompt) -> PrefixInfo | None:
        ids = system_prefix(self._tokenizer, prompt.text, others_follow=self._always)
        if len(ids) >= self._engine.max_model_len:
            raise RequestError(
                f"the system prompt has {len(ids)} tokens, and this model's context is {self._engine.max_model_len}:"
                " shorten it, or start the server with a larger --max-model-len",
                param="text",
                code="context_length_exceeded",
            )
        found = None
        if self._engine.config.cache.reuse:
            about = "" if prompt.salt is None else json.dumps({"text": prompt.text}, ensure_ascii=False)
            found = self._engine.register_prefix(prompt.name, ids, salt=prompt.salt, about=about)
        prompt.ids = ids
        return found

    def forget(self, salt: str, name: str) -> bool:
        """A tenant's prompt is no longer kept, nor put before its requests. Waits. False: there is none of that name."""
        if name == DEFAULT:
            self._own.pop(owner_of(salt), None)
        return self._engine.forget_prefix(name, salt=salt)

    def reset(self, salt: str | None = None, *, tenant: str | None = None) -> None:
        """Those of a salt, of a tenant or of all tenants go before no requests any more: the engine forgets them."""
        whose = everything_of(tenant) if tenant is not None else None if salt is None else owner_of(salt)
        for owner in [owner for owner in self._own if covers(whose, owner)]:
            del self._own[owner]

    def listing(self, salt: str) -> list[PrefixInfo]:
        """The operator's, and one tenant's. Waits."""
        return [*self._engine.prefixes(None), *self._engine.prefixes(salt)]

    # -------------------------------------------------------------------------------------------- requests

    def begin(
        self, messages: Any, salt: str, replies: Mapping[int, Reply] | None
    ) -> tuple[Any, Mapping[int, Reply] | None, _Prompt | None]:
        """Messages with the prompt that they begin with, if they shall; replies have the numbers of their messages.
        Errors: RequestError, for messages that are none."""
        prompt = self._find(salt)
        if prompt is None:
            return messages, replies, None
        if prompt is not self._operators:
            prompt.salt = salt
        flat = flatten_messages(messages)
        if not self._always and any(message["role"] in SYSTEM_ROLES for message in flat):
            return messages, replies, None
        shifted = {number + 1: reply for number, reply in (replies or {}).items()}
        return [{"role": "system", "content": prompt.text}, *flat], shifted, prompt

    def texts(self, salt: str) -> list[str]:
        """What a tenant's requests may begin with."""
        prompt = self._find(salt)
        return [] if prompt is None else [prompt.text]

    def _find(self, salt: str) -> _Prompt | None:
        return (self._own.get(owner_of(salt)) if self._own else None) or self._operators

    def used(self, prompt: _Prompt, ids: Sequence[int]) -> None:
        """A request begins with these ids. If they are not those that were registered, see to it: a template may have the
        day's date in it, or this process has not seen the prompt yet."""
        known = prompt.ids
        if known is not None and list(ids[: len(known)]) == known:
            return
        if not self._engine.config.cache.reuse or time.monotonic() - prompt.tried < AGAIN_SECONDS:
            return
        prompt.tried = time.monotonic()
        task = asyncio.get_running_loop().create_task(self._again(prompt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again(self, prompt: _Prompt) -> None:
        try:
            await PROMPTS(self._register, prompt)
        except RequestError as error:
            log.warning("a system prompt is not kept: %s", error)
