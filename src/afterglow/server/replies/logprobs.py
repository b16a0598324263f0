"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from afterglow.request import TokenLogprob
from afterglow.text import Tokenizer

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
