"""The answer of `/v1/completions` and `/v1/chat/completions`: a list of choices, whole or as events, with their calls,
reasoning and log-probabilities.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from afterglow.library.assemble import Piece
from afterglow.request import TokenLogprob
from afterglow.server.bodies.reply_bodies import ChoicesBody
from afterglow.server.replies.pending_replies import Replies
from afterglow.server.replies.stream import DONE, event
from afterglow.text import Tokenizer
from afterglow.text.tool_calls.parts import CallDelta, Content, Part, Reasoning, ToolCall


class ChoiceReplies(Replies):
    """Replies that are written as choices."""

    body: ChoicesBody

    @abstractmethod
    def head(self) -> dict[str, Any]:
        """Return the fields that all events begin with."""

    @abstractmethod
    async def chunk(self, index: int, piece: Piece, first: bool) -> dict[str, Any] | None:
        """Write the new part of a reply: `choices` and the fields beside it; None if the part is empty."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        async with aclosing(self.pieces()) as pieces:
            async for index, piece in pieces:
                chunk = await self.chunk(index, piece, first=index not in begun)
                begun.add(index)
                if chunk is None:
                    continue
                chunk = {**self.head(), **chunk}
                if self.body.include_usage:
                    chunk["usage"] = self.usage() if self.body.continuous_usage else None
                yield event(chunk)
        if self.body.include_usage:
            yield event({**self.head(), "choices": [], "usage": self.usage()})
        yield DONE

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
    """The parallel lists of `/v1/completions`. Offsets continue from piece to piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """Describe an echoed prompt; its first token has no probability, because nothing comes before."""
        padded = [*logprobs, *[None] * (len(ids) - len(logprobs))]
        return self._lists([(token, found) for token, found in zip(ids, padded, strict=True)])

    def reply(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Describe tokens of the reply."""
        return self._lists([(found.token, found) for found in logprobs])

    def _lists(self, rows: Sequence[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, found in rows:
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
            lists["text_offset"].append(self._offset)
            self._offset += len(name)
        return lists


def join(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Join lists of several pieces."""
    joined: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, values in part.items():
            joined[name].extend(values)
    return joined
