"""From a conversation's messages to the token ids of a prompt, and how long prompt and reply may be."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from afterglow.errors import RequestError
from afterglow.request import ContextWindow
from afterglow.server.blocking import TextThreads
from afterglow.server.bodies.message_bodies import MessagesBody
from afterglow.server.bodies.reply_bodies import Body, ChatBody, ResponseBody
from afterglow.server.prompts.system_prompts import RegisteredPrompt, SystemPrompts
from afterglow.text import ChatPrompt, Reply, Tokenizer
from afterglow.text.block_marks import BlockMark
from afterglow.text.lengths import LONG
from afterglow.text.messages import texts_in
from afterglow.text.turns import TEMPLATE


class ReplyLengths:
    """Lengths of replies on one server, from a request's own limit, the model's defaults and the context window."""

    def __init__(self, window: ContextWindow, default: int | None, max_queue: int) -> None:
        """`default`: tokens of a reply where the request gives no limit (`max_new_tokens` of the model's author)."""
        self.window = window
        self._default = default
        self._max_queue = max_queue

    def check_count(self, count: int, param: str) -> None:
        """Refuse more replies than the queue can hold: a later try would not help. Raises: RequestError."""
        if count > self._max_queue:
            raise RequestError(
                f"{count} replies were asked for at once, and this server's queue holds {self._max_queue} (--max-queue); "
                "ask for them in several requests",
                param=param,
            )

    def longest_prompt(self, body: Body) -> int:
        """Count the tokens up to which a prompt is not truncated; see `ContextWindow.longest`."""
        return self.window.longest(self._wanted(body))

    def max_tokens(self, body: Body, rows: int, cut: bool = False) -> int:
        """Count the tokens that may be generated after a prompt of `rows` tokens. `cut`: the engine may truncate the prompt.

        Raises: RequestError, if prompt and reply do not fit the context.
        """
        window, asked = self.window, body.reply_tokens
        if rows == 0:
            raise RequestError("the prompt is empty", param=body.prompt_field)
        if cut:
            if asked is not None and asked >= window.limit and not body.clamped:
                raise window.error(f"{asked} were asked for the reply alone", body.tokens_field)
            wanted = self._wanted(body)  # a truncated prompt's length is known later: the engine ends the reply
            return min(wanted, window.room(rows if window.fits(rows, wanted) else 1))
        window.refuse(rows, 1 if asked is None else asked, param=body.prompt_field)
        if asked is not None and asked > window.room(rows) and not body.clamped:
            raise window.error(
                f"{rows + asked} were asked for: {rows} in the prompt and {asked} for the reply", body.tokens_field
            )
        return min(self._wanted(body), window.room(rows))

    def _wanted(self, body: Body) -> int:
        if body.reply_tokens is not None:
            return body.reply_tokens
        found = [n for n in (body.default_tokens, self._default) if n is not None]
        return min(found, default=self.window.limit)


log = logging.getLogger("afterglow.server")


class PromptEncoder:
    """Renders and tokenises conversations, each behind the system prompt that is registered for it."""

    def __init__(
        self, tokenizer: Tokenizer, prompts: SystemPrompts, lengths: ReplyLengths, threads: TextThreads
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._lengths = lengths
        self._threads = threads
        self._warned = False  # that the chat template shows no places to cut at

    async def encode(
        self,
        body: ChatBody | ResponseBody | MessagesBody,
        messages: Any,
        salt: str,
        *,
        size: int,
        cut: bool,
        replies: Mapping[int, Reply] | None = None,
        marks: Sequence[BlockMark] = (),
        limited: bool = True,
    ) -> ChatPrompt:
        """Turn the conversation of a request into a prompt. `size`: how much work that is, in characters. `cut`: the engine
        truncates a prompt that is too long, and is told its turns; otherwise such a prompt is an error, unless it is not
        `limited`. `marks`: of blocks of `messages`.

        Raises: RequestError.
        """
        variables = body.template_variables
        tools = body.tool_use.tools

        def work() -> tuple[ChatPrompt, RegisteredPrompt | None]:
            self._tokenizer.check_roles(messages)  # by the client's numbers
            begun, known, registered = self._prompts.begin(messages, salt, replies)
            shift = len(begun) - len(messages) if marks else 0
            found = self._tokenizer.encode_chat(
                begun,
                salt=salt,
                tools=tools,
                variables=variables,
                replies=known,
                cut_over=self._lengths.longest_prompt(body) if cut else None,
                window=None if cut or not limited else self._lengths.window,
                marks=[replace(mark, message=mark.message + shift) for mark in marks],
            )
            return found, registered

        size *= 1 + len(marks)  # to find them is to render anew
        if size <= LONG:
            texts = (*texts_in(messages), *self._prompts.texts(salt))
            # A marker in a message may need another tokenizer, whose construction takes seconds once.
            markers = self._tokenizer.markers
            waits = any(map(markers.mentioned_in, texts)) or markers.mentioned(tools)
            size = LONG + 1 if waits else max(size, sum(map(len, texts)) + body.tool_use.size)
        try:
            prompt, registered = await self._threads.run(size, work)
        except RequestError as error:
            if error.param == "messages":
                error.param = body.prompt_field
            raise
        if prompt.uncut == TEMPLATE and not self._warned:
            self._warned = True
            log.warning("truncation: %s; the oldest tokens after the system prompt are left out instead", TEMPLATE)
        if registered is not None and not variables and not tools:
            self._prompts.used(registered, prompt.ids)
        return prompt
