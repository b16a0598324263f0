"""`/v1/chat/completions` and `/v1/completions`: a list of choices, whole or as events, with their calls, reasoning and log-probabilities;
text in, text out, and the log-likelihoods that evaluation harnesses ask for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, ClassVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError
from afterglow.request import CallDelta, Content, Output, Part, Reasoning, Request, TokenLogprob, ToolCall
from afterglow.server.bodies.reader import read_body
from afterglow.server.bodies.reply_bodies import ChatBody, ChoicesBody, CompletionBody
from afterglow.server.replies.make_requests import chat_requests, check_count, encode, make_requests, max_tokens
from afterglow.server.replies.pending_replies import DONE, Replies, event
from afterglow.server.state import State, state_and_record
from afterglow.text import ChatPrompt, IncrementalDecoder, Tokenizer
from afterglow.text.chat_template import shown


class ChoiceReplies(Replies):
    """Replies that are written as choices."""

    body: ChoicesBody
    object: ClassVar[str]  # what an answer is called,
    part: ClassVar[str]  # and an event

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields that an answer, or an event, begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    async def whole(self) -> Response:
        logprobs: list[list[TokenLogprob]] = [[] for _ in self.texts]
        async with aclosing(self.pieces()) as pieces:
            async for index, piece in pieces:
                logprobs[index].extend(piece.logprobs)
        if self.chat is not None:
            self.remember()
        size = sum(len(reply.text) for reply in self.texts) + self.values * sum(map(len, logprobs))
        size += self.prompt_values * sum(len(request.prompt) for request in self.requests)

        def describe() -> dict[str, Any]:
            choices = [self.choice(index, found) for index, found in enumerate(logprobs)]
            return {**self.head(self.object), **self.prompt_ids(), "choices": choices, "usage": self.usage()}

        return await self.state.text_threads.respond(size, describe)

    @property
    @abstractmethod
    def values(self) -> int:
        """About how many values there are for the log-probabilities of a token."""

    @property
    def prompt_values(self) -> int:
        """About how many values there are for a token of a prompt."""
        return int(bool(self.body.return_token_ids))

    @abstractmethod
    def choice(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Write a whole reply."""

    @abstractmethod
    async def chunk(self, index: int, piece: Output, first: bool) -> dict[str, Any] | None:
        """Write the new part of a reply: `choices` and the fields beside it; None if the part is empty."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        async with aclosing(self.pieces()) as pieces:
            async for index, piece in pieces:
                chunk = await self.chunk(index, piece, first=index not in begun)
                begun.add(index)
                if chunk is None:
                    continue
                chunk = {**self.head(self.part), **chunk}
                if self.body.include_usage:
                    chunk["usage"] = self.usage() if self.body.continuous_usage else None
                yield event(chunk)
        if self.body.include_usage:
            yield event({**self.head(self.part), "choices": [], "usage": self.usage()})
        yield DONE

    def prompt_ids(self) -> dict[str, Sequence[int]]:
        """Return the field beside the choices for the token ids of the prompt they share, where the client wants them."""
        return {}

    def ids(self, tokens: Sequence[int], prompt: Sequence[int] | None = None) -> dict[str, Sequence[int]]:
        """Return the fields for token ids, where the client wants them; `prompt`: those of the prompt as well."""
        if not self.body.return_token_ids:
            return {}
        return {**({"prompt_token_ids": prompt} if prompt is not None else {}), "token_ids": tokens}


def call_fields(call: ToolCall, arguments: str) -> dict[str, Any]:
    """Write a call."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def message_fields(content: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Write the message of a reply: `content` is null where there are calls, or reasoning, alone."""
    return {
        "role": "assistant",
        "content": content if content or not (calls or reasoning) else None,
        "refusal": None,
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": [call_fields(call, call.arguments) for call in calls]} if calls else {}),
    }


def delta_fields(parts: Iterable[Part]) -> dict[str, Any]:
    """Write the new parts of a reply."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallDelta):
            known = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            if part.first:
                calls[part.index] = {"index": part.index, **call_fields(part.call, part.arguments)}
            else:
                known["function"]["arguments"] += part.arguments
        else:
            name = "content" if isinstance(part, Content) else "reasoning_content"
            assert isinstance(part, Content | Reasoning)
            delta[name] = delta.get(name, "") + part.text
    return {**delta, "tool_calls": list(calls.values())} if calls else delta


_LEAST = -9999.0  # JSON has no minus infinity


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as text; part of a character as OpenAI writes it, so that different tokens keep different
    names."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(float(logprob), _LEAST)


def chat_logprobs(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Describe log-probabilities for `/v1/chat/completions`."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": token_name(tokenizer, token), "logprob": _finite(logprob), "bytes": list(data)}

    return {
        "content": [
            {**entry(p.token, p.logprob), "top_logprobs": [entry(t, value) for t, value in p.top]} for p in logprobs
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """The parallel lists of `/v1/completions`. Offsets continue from piece to piece: a token's is where it begins in the text, also if it
    adds nothing to that, as a part of a character or a token that is not shown."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        """`prompt`: the ids before the reply. `skip_special_tokens`: of the reply."""
        self._tokenizer = tokenizer
        self._reply = IncrementalDecoder(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def lists(self, rows: Iterable[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        """Describe new tokens of the reply."""
        return self._lists((token, found, self._place(token)) for token, found in rows)

    def echoed(
        self,
        shown: str,
        prompt: Sequence[tuple[int, TokenLogprob | None]],
        rows: Iterable[tuple[int, TokenLogprob | None]],
    ) -> dict[str, Any]:
        """Describe the tokens of a prompt whose text is `shown`, and the first ones of its reply. The tokenizer may have put special
        tokens before the text. None: a token has no probability, because nothing comes before."""
        decoder, places, at = IncrementalDecoder(self._tokenizer, skip_special_tokens=False), [], 0
        for token, _ in prompt:
            places.append(at)
            at += len(decoder.push((token,)))
        hidden = at + len(decoder.flush()) - len(shown)
        described = [(*row, max(0, place - hidden)) for row, place in zip(prompt, places, strict=True)]
        self._offset = len(shown)
        return self._lists([*described, *((token, found, self._place(token)) for token, found in rows)])

    def _place(self, token: int) -> int:
        """Tell where a token of the reply begins, and go on behind it."""
        place = self._offset
        self._offset += len(self._reply.push((token,)))
        return place

    def _lists(self, rows: Iterable[tuple[int, TokenLogprob | None, int]]) -> dict[str, Any]:
        lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, found, place in rows:
            name = token_name(self._tokenizer, token)
            top: dict[str, float] | None = None
            if found is not None:
                top = {}
                # Two ids may look the same; the likelier one is first and keeps the name.
                for other, value in (*found.top, (token, found.logprob)):
                    top.setdefault(token_name(self._tokenizer, other), _finite(value))
            lists["tokens"].append(name)
            lists["token_logprobs"].append(None if found is None else _finite(found.logprob))
            lists["top_logprobs"].append(top)
            lists["text_offset"].append(place)
        return lists


async def chat_completions(http: HttpRequest) -> Response:
    """Answer a conversation."""
    state, _ = state_and_record(http)
    body = await read_body(http, ChatBody)
    state.models.check(body.model)
    if body.messages is None:
        raise RequestError("messages is required", param="messages")
    check_count(state, body.replies_per_prompt, "n")
    cut = (body.truncation or state.config.chat_truncation) == "auto"
    prompt = await encode(http, body, body.messages, size=body.size, cut=cut)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    requests = chat_requests(http, body, prompt, cut=cut, logprobs=logprobs)
    return await ChatReplies(http, body, requests, prompt).answer()


class ChatReplies(ChoiceReplies):
    """Replies to a conversation."""

    body: ChatBody
    chat: ChatPrompt
    prefix = "chatcmpl-"
    object = "chat.completion"
    part = "chat.completion.chunk"

    @property
    def values(self) -> int:
        return 8 * (1 + (self.body.top_logprobs or 0))

    def choice(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        reply = self.texts[index]
        reasoning = reply.reasoning if self._thinks_aloud else ""
        return {
            "index": index,
            "message": message_fields(reply.content, reasoning, reply.calls),
            "logprobs": self._logprobs(logprobs),
            "finish_reason": reply.reason,
            **self.ids(reply.tokens),
        }

    @property
    def _thinks_aloud(self) -> bool:
        return self.body.include_reasoning is not False

    async def chunk(self, index: int, piece: Output, first: bool) -> dict[str, Any] | None:
        # The role goes out with the first token, not before: a client's clock stops at the first chunk.
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        seen = piece.parts if self._thinks_aloud else [each for each in piece.parts if not isinstance(each, Reasoning)]
        delta |= delta_fields(seen)
        if piece.finish_reason is not None and index == 0:
            self.remember()
        ids = self.ids(piece.tokens)
        if not (delta or piece.finish_reason or piece.logprobs or ids):
            return None
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(piece.logprobs)}
        return {
            **(self.prompt_ids() if first else {}),
            "choices": [{**choice, "finish_reason": self.texts[index].reason, **ids}],
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self.state.tokenizer, logprobs) if self.body.logprobs else None

    def prompt_ids(self) -> dict[str, Sequence[int]]:
        return {"prompt_token_ids": self.chat.ids} if self.body.return_token_ids else {}


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt of `/v1/completions`. `text`: None where it came as ids."""

    ids: list[int]
    text: str | None


async def completions(http: HttpRequest) -> Response:
    """Continue texts."""
    state, record = state_and_record(http)
    body = await read_body(http, CompletionBody)
    state.models.check(body.model)
    prompts = await _prompts(state, body)
    made = []
    for prompt in prompts:
        sampling = body.sampling(state.defaults, max_tokens(state, body, len(prompt.ids)), body.logprobs)
        if body.echo and body.logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=body.logprobs)
        made.append((prompt.ids, sampling))
    requests = make_requests(http, body, made, state.tenants.salt(record.caller, body.cache_salt))
    return await CompletionReplies(http, body, requests, prompts).answer()


async def _prompts(state: State, body: CompletionBody) -> list[TextPrompt]:
    """Tokenise the prompts that are texts, and check those that are ids. Raises: RequestError."""
    items: list[Any] = body.prompt
    tokenizer = state.tokenizer
    check_count(state, len(items) * body.replies_per_prompt, "prompt" if len(items) > 1 else "n")

    for item in items:
        if isinstance(item, str):
            tokenizer.check_length(item, state.window, "prompt")

    def encode() -> list[TextPrompt]:
        return [
            TextPrompt(tokenizer.encode(item, add_special_tokens=body.add_special_tokens), item)
            if isinstance(item, str)
            else TextPrompt(item, None)
            for item in items
        ]

    found = await state.text_threads.run(sum(map(len, items)), encode)
    for prompt in found:
        if prompt.text is None and not 0 <= min(prompt.ids) <= max(prompt.ids) < state.engine.vocab_size:
            bad = next(i for i in prompt.ids if not 0 <= i < state.engine.vocab_size)
            raise RequestError(
                f"prompt: token id {shown(bad)} is outside the vocabulary of {state.engine.vocab_size} tokens",
                param="prompt",
            )
    return found


class CompletionReplies(ChoiceReplies):
    """Replies to texts."""

    body: CompletionBody
    prefix = "cmpl-"
    object = part = "text_completion"

    def __init__(
        self, http: HttpRequest, body: CompletionBody, requests: Sequence[Request], prompts: Sequence[TextPrompt]
    ) -> None:
        super().__init__(http, body, requests)
        self._prompts = prompts
        tokenizer, skip = self.state.tokenizer, body.skip_special_tokens
        wanted = requests if body.logprobs is not None else ()
        self._logprobs = [CompletionLogprobs(tokenizer, each.prompt, skip_special_tokens=skip) for each in wanted]

    @property
    def values(self) -> int:
        return 8 * (1 + (self.body.logprobs or 0))

    @property
    def prompt_values(self) -> int:
        return super().prompt_values + (self.values if self.body.echo else 0)

    def choice(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        reply = self.texts[index]
        choice = self._write(index, reply.content, logprobs, reply.finish, echoes=True)
        return choice | self.ids(reply.tokens, self.requests[index].prompt)

    async def chunk(self, index: int, piece: Output, first: bool) -> dict[str, Any] | None:
        def work() -> dict[str, Any]:
            return self._write(index, piece.text, piece.logprobs, piece.finish_reason, echoes=first)

        size = self.prompt_values * len(self.requests[index].prompt) if first and self.body.echo else 0
        choice = await self.state.text_threads.run(size, work)
        ids = self.ids(piece.tokens, self.requests[index].prompt if first else None)
        lists = choice["logprobs"]
        if not (choice["text"] or piece.finish_reason or (lists and lists["tokens"]) or ids):
            return None
        return {"choices": [choice | ids]}

    def _write(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish: str | None, *, echoes: bool
    ) -> dict[str, Any]:
        """Write a choice, or a part of one. `echoes`: the prompt comes before it, where the client wants that."""
        body = self.body
        told = self._logprobs[index] if body.logprobs is not None else None
        rows = [(found.token, found) for found in logprobs]
        lists = None
        if echoes and body.echo:
            prompt = self._prompts[index // body.replies_per_prompt]
            shown = self.state.tokenizer.decode(prompt.ids, False) if prompt.text is None else prompt.text
            text = shown + text
            if told is not None:
                lists = told.echoed(shown, list(zip_longest(prompt.ids, self.texts[index].prompt_logprobs)), rows)
        elif told is not None:
            lists = told.lists(rows)
        return {"index": index, "text": text, "logprobs": lists, "finish_reason": finish}
