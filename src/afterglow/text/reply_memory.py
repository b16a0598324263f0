"""The ids of our own replies, for when they come back as text.

A client sends a conversation back as text. Tokenising a reply anew may give other ids than the model
generated (byte pairs may differ), and every row after the first difference would have to be computed again.
So the ids of a reply are remembered under the prompt that it answered, and spliced in where that prompt and
that text come back.

A reply that clients got in parts comes back as content, calls and reasoning, and the template writes it in its own way: with other
white space, say. So its generated ids do not decode to that text. The place where the template's text of it ends is found by
marks in the messages that follow; what lies between its prompt and that place is the reply.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from afterglow.text.messages import names_of_calls

_ENTRY = 64  # ids that take as much memory as a reply does besides its own: objects, keys, digests


@dataclass(frozen=True, slots=True)
class Asked:
    """What a prompt was made of: messages as `flatten_messages` makes them, tools, variables of the template, and replies that
    another store kept. `continues`: the last message is a reply that goes on."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, object] | None = None
    replies: Mapping[int, Reply] = field(default_factory=dict)
    continues: bool = False


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered and tokenised conversation, up to and including the generation prompt, or the beginning of a reply."""

    ids: list[int]
    text: str
    salt: str
    chain: bytes  # names (salt, messages); see `chains`
    spliced: int = 0  # replies whose generated ids were used
    retokenised: int = 0  # replies that were tokenised anew
    known: tuple[bytes, ...] = ()  # what names the replies that came back and were remembered here
    turns: tuple[int, ...] = ()  # rows at which turns begin, where they were asked for; see `turns.py`
    uncut: str | None = None  # why it cannot be cut between turns, where that was asked for
    asked: Asked = field(default=Asked(()), repr=False, compare=False)
    # The rows up to the end of each marked block, 0 where that is not found; see `turns.py`.
    marks: tuple[int, ...] = ()
    begun: Reply | None = None  # the reply that the prompt ends in, and that goes on

    @property
    def beginning(self) -> str:
        """Return the content that the reply goes on from; empty for a new reply."""
        return self.begun.begun + self.begun.text if self.begun is not None else ""


@dataclass(frozen=True, slots=True)
class Reply:
    """A generated reply: `text` as the client saw it, `ids` that decode to it.

    `end` is the special token after the ids, if it was generated too. The prompt is known by length and digest.
    `parts` is None where the ids decode to `text`. Otherwise the client got the reply in parts, of which `text` is the content and
    `parts` names the rest: see `parts_digest`. `begun`: what the client wrote before `text`; the prompt ends with it.
    """

    text: str
    ids: array[int]
    end: int | None
    prompt_chars: int
    prompt_digest: bytes
    parts: bytes | None = None
    begun: str = ""

    @classmethod
    def begin(cls, content: str, prompt: str) -> Reply:
        """Describe a reply that a client has begun. `prompt`: the text of the prompt, which ends with `content`."""
        return cls("", array("I"), None, len(prompt), text_digest(prompt), begun=content)

    def go_on(self, text: str, ids: Sequence[int], end: int | None, parts: bytes | None) -> Reply:
        """Return this reply with what was generated behind it."""
        return replace(self, text=self.text + text, ids=self.ids + array("I", ids), end=end, parts=parts)

    def as_json(self) -> dict[str, Any]:
        """Return everything but the text, for a store that keeps the text itself; `from_json` reads it."""
        return {
            "ids": self.ids.tolist(),
            "end": self.end,
            "prompt_chars": self.prompt_chars,
            "prompt_digest": self.prompt_digest.hex(),
            **({"parts": self.parts.hex()} if self.parts is not None else {}),
            **({"begun": self.begun} if self.begun else {}),
        }

    @classmethod
    def from_json(cls, text: str, value: Mapping[str, Any]) -> Reply:
        """Make a reply of its text and of the rest, as `as_json` wrote it."""
        digest = bytes.fromhex(value["prompt_digest"])
        parts = bytes.fromhex(value["parts"]) if "parts" in value else None
        begun = value.get("begun", "")
        return cls(text, array("I", value["ids"]), value["end"], value["prompt_chars"], digest, parts, begun)

    def answers(self, message: Mapping[str, Any]) -> bool:
        """Check whether a message is this reply, as the client got it."""
        if self.begun + self.text != message["content"]:
            return False
        if self.parts is None:
            return "tool_calls" not in message and "reasoning_content" not in message
        return self.parts == parts_digest(message)


@dataclass(slots=True)
class _KeptReply:
    salt: str
    reply: Reply
    expires: float
    session: str | None = None  # the conversation's name


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt: characters and their ids. `whole`: they are a reply's, whose inner borders are not known.
    `lead`: the marker just before the part."""

    start: int
    stop: int
    ids: list[int] = field(repr=False)
    whole: bool = False
    lead: str = ""


def chains(
    salt: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> Iterator[bytes]:
    """Yield for each message a key of the messages before it, and at the end a key of all messages. Linear in the text.

    A key only finds candidates, since messages may hold more than role, content and calls: the rendered text decides.
    """
    state = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16)

    def add(part: str) -> None:
        data = part.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little") + data)

    if tools:
        add(json.dumps(list(tools)))
    for message in messages:
        yield state.digest()
        add(message["role"])
        add(message["content"])
        if "tool_calls" in message:
            add(names_of_calls(message))
    yield state.digest()


def parts_digest(message: Mapping[str, Any]) -> bytes:
    """Name the parts of a reply besides its content: its calls, without their ids, which no model sees, and its reasoning."""
    reasoning = message.get("reasoning_content")
    return text_digest(names_of_calls(message) + (f"\0{reasoning}" if reasoning else ""))


def text_digest(text: str) -> bytes:
    """Hash a text, lone surrogates included."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class ReplyMemory:
    """Replies by conversation; the least recently used is forgotten first. Safe to use from several threads.

    The memory holds at most `max_tokens` ids; each reply counts as some ids more for its objects and keys. The texts
    take about as many bytes besides. A reply has a time at which it expires, which every use puts off; `sweep` forgets
    expired ones.
    """

    def __init__(self, max_tokens: int = 2_000_000) -> None:
        self._max_tokens = max_tokens
        self._replies: OrderedDict[bytes, _KeptReply] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._replies)

    @property
    def tokens(self) -> int:
        """Return the ids in use, with the extra ids that each reply counts as."""
        return self._tokens

    def put(
        self,
        prompt: ChatPrompt,
        text: str,
        ids: Sequence[int],
        end: int | None,
        expires: float = inf,
        parts: bytes | None = None,
    ) -> Reply:
        """Keep the reply to a prompt until `expires`, and the replies in the prompt at least as long."""
        begun = prompt.begun or Reply.begin("", prompt.text)
        reply = begun.go_on(text, ids, end, parts)
        self.restore(prompt.chain, prompt.salt, reply, expires)
        with self._lock:
            for chain in prompt.known:
                if (kept := self._replies.get(chain)) is not None:
                    kept.expires = max(kept.expires, expires)
        return reply

    def restore(self, chain: bytes, salt: str, reply: Reply, expires: float = inf) -> None:
        """Take over a reply that was kept elsewhere."""
        with self._lock:
            self._drop(chain)
            self._replies[chain] = _KeptReply(salt, reply, expires)
            self._tokens += _cost(reply)
            while self._tokens > self._max_tokens:
                self._drop(next(iter(self._replies)))

    def get(self, chain: bytes) -> Reply | None:
        """Return the reply to the conversation with this key, or None."""
        with self._lock:
            found = self._replies.get(chain)
            if found is None:
                return None
            self._replies.move_to_end(chain)
            return found.reply

    def clear(self, whose: Callable[[str], bool] = lambda salt: True) -> None:
        """Forget the replies whose salt satisfies `whose`."""
        with self._lock:
            for chain in [chain for chain, kept in self._replies.items() if whose(kept.salt)]:
                self._drop(chain)

    def assign(self, chain: bytes, session: str) -> None:
        """Note to which named conversation a reply belongs."""
        with self._lock:
            if (found := self._replies.get(chain)) is not None:
                found.session = session

    def forget(self, whose: Callable[[str], bool], session: str) -> int:
        """Forget the replies of a named conversation whose salt satisfies `whose`; return their number."""
        with self._lock:
            own = [chain for chain, kept in self._replies.items() if kept.session == session and whose(kept.salt)]
            for chain in own:
                self._drop(chain)
        return len(own)

    def sweep(self, now: float) -> None:
        """Forget the replies that have expired."""
        with self._lock:
            for chain in [chain for chain, kept in self._replies.items() if kept.expires <= now]:
                self._drop(chain)

    def _drop(self, chain: bytes) -> None:
        if found := self._replies.pop(chain, None):
            self._tokens -= _cost(found.reply)


def _cost(reply: Reply) -> int:
    return len(reply.ids) + _ENTRY


def splice(
    text: str,
    replies: Sequence[tuple[Reply, int | None]],
    encode: Callable[[int, int, str], list[int]],
    special_at: Callable[[int], int | None],
    special_text: Callable[[int], str],
) -> tuple[list[Segment], int]:
    """Tokenise `text` with the ids of `replies` (in order) put in where they fit; return the segments, and how many
    replies fit.

    `encode(start, stop, lead)` tokenises a part of the text, see `Markers.encode`. A reply fits if the text begins with
    the very prompt that it answered, goes on with its text, and then ends, or a special token follows. Tokenizers cut at
    special tokens first, so the text before one does not change the ids after it. Of a reply that the client got in parts the
    template writes another text: it ends at the character that stands beside the reply.
    """
    segments: list[Segment] = []
    done = 0  # characters whose ids are known
    lead = ""  # the special token that was just passed
    used = 0

    def tokenise(stop: int) -> None:
        if stop > done:
            segments.append(Segment(done, stop, encode(done, stop, lead), lead=lead))

    for reply, given in replies:
        start = reply.prompt_chars
        stop = start + len(reply.text) if given is None else given
        if start < done or not start <= stop <= len(text):
            continue
        if given is None and not text.startswith(reply.text, start):
            continue
        following = special_at(stop)
        cut = following is not None or stop == len(text)
        if not cut or text_digest(text[:start]) != reply.prompt_digest:
            continue
        tokenise(start)
        segments.append(Segment(start, stop, reply.ids.tolist(), whole=True))
        done, lead, used = stop, "", used + 1
        if following is not None and following == reply.end:
            lead = special_text(following)
            done += len(lead)
            segments.append(Segment(stop, done, [following], whole=True))
    tokenise(len(text))
    return segments, used


def rows_at(
    segments: Sequence[Segment], chars: Sequence[int], starts_of: Callable[[Segment], Sequence[int]]
) -> list[tuple[int, bool]]:
    """Return for each character (ascending) how many tokens begin before it, and whether a token begins, or the text
    ends, exactly there. `starts_of` a segment: the characters at which its tokens begin."""
    found: list[tuple[int, bool]] = []
    row = 0
    waiting = deque(chars)
    for segment in segments:
        starts: Sequence[int] | None = None
        while waiting and waiting[0] < segment.stop:
            char = waiting.popleft()
            if char == segment.start or segment.whole:
                found.append((row, char == segment.start))
                continue
            starts = starts_of(segment) if starts is None else starts
            number = bisect.bisect_left(starts, char)
            found.append((row + number, number < len(starts) and starts[number] == char))
        row += len(segment.ids)
    return found + [(row, not segments or char == segments[-1].stop) for char in waiting]
