"""The ids of our own replies, for when they come back as text.

A client sends a conversation back as text. Tokenising a reply anew may give other ids than the model
generated (byte pairs may differ), and every row after the first difference would have to be computed again.
So the ids of a reply are remembered under the prompt that it answered, and spliced in where that prompt and
that text come back.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered and tokenised conversation, up to and including the generation prompt."""

    ids: list[int]
    text: str
    salt: str
    chain: bytes  # names (salt, messages); see `chains`
    spliced: int = 0  # replies whose generated ids were used
    retokenised: int = 0  # replies that were tokenised anew


@dataclass(frozen=True, slots=True)
class Reply:
    """What was generated after a prompt: `text` as the client saw it, `ids` that decode to it.

    `end` is the special token after them, if it was generated too. The prompt is known by length and digest.
    """

    text: str
    ids: array[int]
    end: int | None
    prompt_chars: int
    prompt_digest: bytes


def chains(salt: str, messages: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """For each message a key of the messages before it; at last one of them all. Linear in the text.

    It only finds candidates (what else a message may hold is not in it): the rendered text decides.
    """
    state = hashlib.blake2b(salt.encode(), digest_size=16)
    for message in messages:
        yield state.digest()
        for part in (message["role"], message["content"]):
            data = part.encode("utf-8", "surrogatepass")
            state.update(len(data).to_bytes(8, "little") + data)
    yield state.digest()


def text_digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class ReplyMemory:
    """Replies by conversation, the least recently used forgotten first. Safe to use from several threads.

    It holds at most `max_tokens` ids, and about as many bytes of text as their text has.
    """

    def __init__(self, max_tokens: int = 2_000_000) -> None:
        self._max_tokens = max_tokens
        self._replies: OrderedDict[bytes, Reply] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._replies)

    @property
    def tokens(self) -> int:
        return self._tokens

    def put(self, prompt: ChatPrompt, text: str, ids: Sequence[int], end: int | None) -> None:
        reply = Reply(text, array("I", ids), end, len(prompt.text), text_digest(prompt.text))
        with self._lock:
            if old := self._replies.pop(prompt.chain, None):
                self._tokens -= len(old.ids) + 1
            self._replies[prompt.chain] = reply
            self._tokens += len(reply.ids) + 1
            while self._tokens > self._max_tokens:
                _, gone = self._replies.popitem(last=False)
                self._tokens -= len(gone.ids) + 1

    def get(self, chain: bytes) -> Reply | None:
        with self._lock:
            reply = self._replies.get(chain)
            if reply is not None:
                self._replies.move_to_end(chain)
            return reply

    def clear(self) -> None:
        with self._lock:
            self._replies.clear()
            self._tokens = 0


def splice(
    text: str,
    replies: Sequence[Reply],
    encode: Callable[[str], list[int]],
    special_at: Callable[[str, int], int | None],
    special_text: Callable[[int], str],
) -> tuple[list[int], int]:
    """The ids of `text` with the ids of `replies` (in order) put in where they fit, and how many did.

    A reply fits if the text begins with the very prompt that it answered, goes on with its text, and a
    special token follows: tokenizers cut there first, so what is before it has no say in the ids after it.
    """
    ids: list[int] = []
    done = 0  # characters whose ids are known
    lead = ""  # the special token that was just passed; see below
    used = 0

    def tokenise(stop: int) -> None:
        if stop > done:
            # Behind a special token a piece may be tokenised otherwise than at the start of a text (a space
            # marker in front), so the token comes along and its id is dropped again.
            ids.extend(encode(lead + text[done:stop])[1 if lead else 0 :])

    for reply in replies:
        start, stop = reply.prompt_chars, reply.prompt_chars + len(reply.text)
        if start < done or stop >= len(text) or not text.startswith(reply.text, start):
            continue
        following = special_at(text, stop)
        if following is None or text_digest(text[:start]) != reply.prompt_digest:
            continue
        tokenise(start)
        ids.extend(reply.ids)
        done, lead, used = stop, "", used + 1
        if following == reply.end:
            ids.append(following)
            lead = special_text(following)
            done += len(lead)
    tokenise(len(text))
    return ids, used
