"""Registered system prompts: the system message of requests without one, computed before the first request
(RelayAttention §3). The operator's serves all tenants; a tenant's own is preferred, and serves that tenant alone."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from afterglow.engine.requests import owner_of
from afterglow.errors import ConfigError, RequestError
from afterglow.listings import PrefixInfo
from afterglow.plan.prefix.salts import covers, everything_of
from afterglow.server.blocking import PROMPTS
from afterglow.server.bridge import EngineLike
from afterglow.server.server_config import SystemPromptMode
from afterglow.text import Reply, Tokenizer, flatten_messages
from afterglow.text.next_turn import system_prefix

log = logging.getLogger("afterglow.server")

DEFAULT = (
    "default"  # the prompt of this name begins a tenant's requests; prompts of other names are only kept in the cache
)
OPERATORS = "system-prompt"
AGAIN_SECONDS = 60.0  # between attempts to register a prompt whose tokens have changed (a date in the template)
SYSTEM_ROLES = ("system", "developer")


@dataclass(slots=True)
class RegisteredPrompt:
    """A system prompt. `ids`: its tokens, with which requests begin; None if this process has not computed them.
    `salt`: None for the operator's; a tenant's is known from its first request on."""

    text: str
    salt: str | None
    name: str
    ids: list[int] | None = None
    tried: float = field(default=float("-inf"))


class SystemPrompts:
    """The registered prompts of one server, by tenant."""

    def __init__(self, engine: EngineLike, tokenizer: Tokenizer, mode: SystemPromptMode) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._always = mode == "always"
        self._operators: RegisteredPrompt | None = None
        self._own: dict[str, RegisteredPrompt] = {}  # the tenants', by the plan's name of the salt
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------------ registering

    def start(self, text: str | None) -> None:
        """Restore tenants' prompts after a restart; compute or load the operator's, and unregister an earlier one.
        Blocks. Raises: ConfigError."""
        if self._engine.config.cache.reuse:
            known = self._engine.all_prefixes()
            for owner, found in known.items():
                for info in found:
                    if info.name == DEFAULT and info.about:
                        self._own[owner] = RegisteredPrompt(str(json.loads(info.about)["text"]), "", DEFAULT)
            if text is None and owner_of(None) in known:
                self._engine.forget_prefix(OPERATORS, salt=None)
        if text is None:
            return
        began = time.perf_counter()
        prompt = RegisteredPrompt(text, None, OPERATORS)
        try:
            done = self._register(prompt)
        except RequestError as error:
            raise ConfigError(f"--system-prompt-file: {error}") from None
        self._operators = prompt
        if done is not None:
            log.info(
                "the system prompt's %d tokens are ready after %.1f s, %d came from the cache",
                done.tokens, time.perf_counter() - began, done.cached,
            )  # fmt: skip

    def register(self, salt: str, name: str, text: str) -> PrefixInfo:
        """Compute a tenant's prompt and keep it. Blocks. Raises: RequestError."""
        text = text.strip()
        if not text:
            raise RequestError("text must not be empty", param="text")
        prompt = RegisteredPrompt(text, salt, name)
        found = self._register(prompt)
        if found is None:
            raise RequestError("nothing is kept with --no-reuse, so no prompt can be registered")
        if name == DEFAULT:
            self._own[owner_of(salt)] = prompt
        return found

    def _register(self, prompt: RegisteredPrompt) -> PrefixInfo | None:
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
        """Unregister a tenant's prompt. Blocks. Returns False if there is none of that name."""
        if name == DEFAULT:
            self._own.pop(owner_of(salt), None)
        return self._engine.forget_prefix(name, salt=salt)

    def reset(self, salt: str | None = None, *, tenant: str | None = None) -> None:
        """Put the prompts of a salt, of a tenant or of all tenants before no more requests; the engine forgets their
        rows."""
        self.reset_of(everything_of(tenant) if tenant is not None else None if salt is None else owner_of(salt))

    def reset_of(self, whose: str | None) -> None:
        """Do as `reset`, for rows of the plan's (see `covers`)."""
        for owner in [owner for owner in list(self._own) if covers(whose, owner)]:
            self._own.pop(owner, None)

    def know(self, owner: str, name: str, text: str) -> None:
        """Take over a prompt that was registered on another server; its rows are found or computed with the first request."""
        known = self._own.get(owner)
        if name == DEFAULT and (known is None or known.text != text):
            self._own[owner] = RegisteredPrompt(text, "", DEFAULT)

    def drop(self, owner: str, name: str) -> None:
        """Put a prompt that was unregistered on another server before no more requests."""
        if name == DEFAULT:
            self._own.pop(owner, None)

    def listing(self, salt: str) -> list[PrefixInfo]:
        """List the operator's prompt, and those of one tenant. Blocks."""
        return [*self._engine.prefixes(None), *self._engine.prefixes(salt)]

    # -------------------------------------------------------------------------------------------- requests

    def begin(
        self, messages: Any, salt: str, replies: Mapping[int, Reply] | None
    ) -> tuple[Any, Mapping[int, Reply] | None, RegisteredPrompt | None]:
        """Put the registered prompt before messages without a system message. Returns the messages, the replies by
        their new numbers, and the prompt. Raises: RequestError, for malformed messages."""
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
        """List the texts that a tenant's requests may begin with."""
        prompt = self._find(salt)
        return [] if prompt is None else [prompt.text]

    def _find(self, salt: str) -> RegisteredPrompt | None:
        return (self._own.get(owner_of(salt)) if self._own else None) or self._operators

    def used(self, prompt: RegisteredPrompt, ids: Sequence[int]) -> None:
        """Register a prompt again if a request that begins with it has other `ids`: the template may contain the date,
        or this process may not have computed the prompt yet."""
        known = prompt.ids
        if known is not None and list(ids[: len(known)]) == known:
            return
        if not self._engine.config.cache.reuse or time.monotonic() - prompt.tried < AGAIN_SECONDS:
            return
        prompt.tried = time.monotonic()
        task = asyncio.get_running_loop().create_task(self._again(prompt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again(self, prompt: RegisteredPrompt) -> None:
        try:
            await PROMPTS(self._register, prompt)
            if prompt.salt is not None and owner_of(prompt.salt) not in self._own:  # unregistered meanwhile
                await PROMPTS(partial(self._engine.forget_prefix, prompt.name, salt=prompt.salt))
        except RequestError as error:
            log.warning("a system prompt is not kept: %s", error)
