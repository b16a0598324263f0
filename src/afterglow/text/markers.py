"""Markers that a chat template writes, told from the same characters in a user's message.

`<|assistant|>` typed by a user, or found on a quoted web page, must not begin the assistant's turn. So text that looks
like a marker inside a message is hidden while the template is rendered, and tokenised as plain text afterwards: by a
twin of the tokenizer, which knows the markers under secret names. Everything else stays as it is; a conversation
without such text never uses the twin.
"""

from __future__ import annotations

import bisect
import json
import logging
import os.path
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from afterglow.errors import RequestError
from afterglow.text import lengths

log = logging.getLogger("afterglow.text")
Tools = Sequence[Mapping[str, Any]]
Write = Callable[[Sequence[Mapping[str, Any]], Tools], str]  # messages and tools to text


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as its template writes it. The spans (start, stop) in `literals` look like markers and are plain
    text."""

    text: str
    literals: tuple[tuple[int, int], ...] = ()

    def in_literal(self, char: int) -> bool:
        """Check whether a character lies inside of such a span, and not at its beginning."""
        return any(start < char < stop for start, stop in self.literals)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a part of the rendered text."""

    ids: list[int]
    offsets: Callable[
        [], Sequence[tuple[int, int]]
    ]  # in the text that was read: the part, or the part with markers under other names
    read: Sequence[int] = (0,)  # where the pieces of that text begin,
    places: Sequence[int] = (0,)  # and where the pieces are in the rendered text

    def starts(self) -> list[int]:
        """List for each token the character of the rendered text at which it begins."""
        return [self._place(span) for span in self.offsets()]

    def ended(self, char: int) -> int:
        """Count the tokens that end at a character of the rendered text, or before."""
        spans = self.offsets()
        number = bisect.bisect_left(spans, char, key=self._place)
        exact = number < len(spans) and self._place(spans[number]) == char
        return number if exact else max(number - 1, 0)

    def _place(self, span: tuple[int, int]) -> int:
        """Return the character of the rendered text at which a token begins."""
        number = max(0, bisect.bisect_right(self.read, span[0]) - 1)
        return self.places[number] + span[0] - self.read[number]


def any_of(texts: Sequence[str], depth: int = 100) -> str:
    """Write a regular expression that finds the longest of `texts`; there must be one at least.

    The beginnings that texts share are written once: otherwise each `<` would be compared with every marker, and some
    tokenizers have a thousand. `depth`: groups within groups, which `re` compiles by recursion.
    """
    if len(texts) == 1 or not depth:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    head = os.path.commonprefix(texts)  # noqa: RUF071 - of characters, not of folders
    rests: dict[str, list[str]] = {}  # by their first character
    for text in texts:
        if text != head:
            rests.setdefault(text[len(head)], []).append(text[len(head) :])
    inside = "|".join(any_of(each, depth - 1) for each in rests.values())
    return f"{re.escape(head)}(?:{inside})" + "?" * (head in texts)


class Markers:
    """The markers of one tokenizer, text to id. `unknown` is the marker that also stands for unknown characters."""

    def __init__(self, fast: tokenizers.Tokenizer, markers: Mapping[str, int], unknown: str | None = None) -> None:
        self._fast = fast
        self._ids = dict(markers)
        self._telling = {number for text, number in markers.items() if text != unknown}
        self._texts = sorted(markers, key=lambda text: (-len(text), text))  # the longest first, as tokenizers match
        self._pattern = re.compile(any_of(self._texts)) if markers else None
        # It cannot be guessed, so a user cannot type the names that are made with it.
        self._nonce = secrets.token_hex(8)
        self._hidden = re.compile(f"\ue000{self._nonce}m(\\d+)\ue001")
        self._names = {text: f"\ue000{self._nonce}m{number}\ue001" for number, text in enumerate(self._texts)}
        # Markers that are looked for in normalised text can be written in more ways than one.
        self._normalised = fast.normalizer is not None and any(
            token.normalized for token in fast.get_added_tokens_decoder().values() if token.content in self._ids
        )
        self._twin: _Twin | None = None
        self._lock = threading.Lock()
        self._warned = False

    @property
    def ids(self) -> Collection[int]:
        """Return the ids of all markers."""
        return self._ids.values()

    def mentioned(self, values: Sequence[Mapping[str, Any]]) -> bool:
        """Check whether a message or a tool holds text that looks like a marker."""
        return any(self.mentioned_in(text) for value in values for text in _texts(value))

    def mentioned_in(self, text: str) -> bool:
        """Check whether a text holds text that looks like a marker."""
        return self._pattern is not None and self._pattern.search(text) is not None

    def render(self, write: Write, messages: Sequence[Mapping[str, Any]], tools: Tools = ()) -> Rendered:
        """Render messages with `write`, the template, and find the text in them that looks like a marker.

        Raises: RequestError, from the template.
        """
        plain = write(messages, tools)
        if not self.mentioned([*messages, *tools]):
            return Rendered(plain)
        hidden_tools = [self._hide(tool) for tool in tools]
        # Templates that look for markers (to leave thoughts out, say) look for them in the assistant's messages.
        for trusted in ((), ("assistant",)):
            hidden = [m if m["role"] in trusted else self._hide(m) for m in messages]
            found = self._reveal(write, hidden, hidden_tools)
            if found.text == plain:
                return found
        self._warn("the chat template looks for markers inside messages, where they keep their meaning therefore")
        return Rendered(plain)

    def at(self, rendered: Rendered, char: int) -> int | None:
        """Return the marker that begins at a character of the text, or None."""
        found = self._pattern.match(rendered.text, char) if self._pattern is not None else None
        if found is None or any(start < found.end() and char < stop for start, stop in rendered.literals):
            return None
        return self._ids[found.group()]

    def encode(self, rendered: Rendered, start: int, stop: int, lead: str = "") -> Encoded:
        """Tokenise a part of the text. `lead` is the marker just before the part: behind a marker a text may be
        tokenised otherwise than at the very beginning (a space marker in front). The tokens of `lead` are left out.

        Raises: RequestError, if the tokenizer can write a marker's characters only as the marker.
        """
        first = 1 if lead else 0
        plain = lengths.encode(self._fast, lead + rendered.text[start:stop], False)
        encoded = Encoded(plain.ids[first:], lambda: plain.offsets[first:], (len(lead),), (start,))
        literals = [span for span in rendered.literals if span[0] < stop and span[1] > start]
        if not literals and not self._normalised:
            return encoded
        wanted = self._wanted(rendered.text, start, stop, literals)
        if not literals and self._markers(encoded.ids) == wanted:
            return encoded
        return self._by_twin(rendered.text, start, stop, lead, literals, wanted, encoded)

    # ---------------------------------------------------------------------------------------------- inside

    def _by_twin(
        self,
        text: str,
        start: int,
        stop: int,
        lead: str,
        literals: Sequence[tuple[int, int]],
        wanted: list[int],
        otherwise: Encoded,
    ) -> Encoded:
        twin = self._find_twin()
        found = twin.encode(self._pieces(text, start, stop, literals), self._names[lead] if lead else "")
        markers = self._markers(found.ids)
        if markers == wanted:
            return found
        if len(markers) > len(wanted):
            name = next(t for t in self._texts if markers.count(self._ids[t]) > wanted.count(self._ids[t]))
            raise RequestError(
                f"a message holds the characters of the special token {name}, and this model's tokenizer cannot "
                "write them as plain text; leave them out",
                param="messages",
            )
        self._warn("the tokenizer finds its markers only in some places, so those inside messages keep their meaning")
        return otherwise

    def _pieces(self, text: str, start: int, stop: int, literals: Sequence[tuple[int, int]]) -> list[tuple[int, str]]:
        """Split the text into pieces (place in the text, what the twin reads), with markers under the twin's names."""
        pieces = []
        for left, right in [*literals, (stop, stop)]:
            if self._pattern is not None:
                for found in self._pattern.finditer(text, start, left):
                    pieces.append((start, text[start : found.start()]))
                    pieces.append((found.start(), self._names[found.group()]))
                    start = found.end()
            pieces.append((start, text[start:right]))
            start = right
        return [piece for piece in pieces if piece[1]]

    def _wanted(self, text: str, start: int, stop: int, literals: Sequence[tuple[int, int]]) -> list[int]:
        by_name = {self._names[marker]: number for marker, number in self._ids.items()}
        return self._markers(by_name.get(read, -1) for _, read in self._pieces(text, start, stop, literals))

    def _markers(self, ids: Iterable[int]) -> list[int]:
        return [number for number in ids if number in self._telling]

    def _reveal(self, write: Write, hidden: Sequence[Mapping[str, Any]], tools: Tools) -> Rendered:
        try:
            pieces = self._hidden.split(write(hidden, tools))
        except RequestError:
            return Rendered("")
        literals, at = [], 0
        for number, piece in enumerate(pieces):
            if number % 2:
                pieces[number] = self._texts[int(piece)]
                literals.append((at, at + len(pieces[number])))
            at += len(pieces[number])
        return Rendered("".join(pieces), tuple(literals))

    def _hide(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value if key == "role" else self._hide_in(value) for key, value in message.items()}

    def _hide_in(self, value: Any) -> Any:
        """Give markers in a value other names, in objects and lists too: arguments of calls, schemas of tools."""
        if isinstance(value, str) and self._pattern is not None:
            return self._pattern.sub(lambda found: self._names[found.group()], value)
        if isinstance(value, Mapping):
            return {self._hide_in(key): self._hide_in(each) for key, each in value.items()}
        return [self._hide_in(each) for each in value] if isinstance(value, list) else value

    def _find_twin(self) -> _Twin:
        with self._lock:
            if self._twin is None:  # it costs about as much as loading the tokenizer did
                self._twin = _Twin(self._fast, self._names)
            return self._twin

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s", what)


class _Twin:
    """The same tokenizer with other names for its markers."""

    def __init__(self, fast: tokenizers.Tokenizer, names: Mapping[str, str]) -> None:
        state = json.loads(fast.to_str())
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        state["post_processor"] = None  # adds special tokens by name, and is never asked to
        model = state["model"]
        # Of many models the markers are in the vocabulary too: there a plain text must not find them either.
        vocab = model.get("vocab")
        if isinstance(vocab, dict):
            made = {
                "".join(pair) if isinstance(pair, list) else pair.replace(" ", "") for pair in model.get("merges", ())
            }
            model["vocab"] = {text if text in made else names.get(text, text): i for text, i in vocab.items()}
        elif isinstance(vocab, list):
            model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        self._fast = tokenizers.Tokenizer.from_str(json.dumps(state))
        known = fast.get_vocab(with_added_tokens=True)
        renamed = {name: text for text, name in names.items()}
        self._ids = {
            number: known[original]
            for text, number in self._fast.get_vocab(with_added_tokens=True).items()
            if (original := renamed.get(text, text)) in known and known[original] != number
        }

    def encode(self, pieces: Sequence[tuple[int, str]], lead: str) -> Encoded:
        """Encode pieces that `Markers._pieces` made. `lead` is the twin's name of the marker before them, or empty."""
        read, at = lead, []
        for _, text in pieces:
            at.append(len(read))
            read += text
        first = 1 if lead else 0
        found = lengths.encode(self._fast, read, False)
        ids = [self._ids.get(number, number) for number in found.ids[first:]]
        return Encoded(ids, lambda: found.offsets[first:], at, [place for place, _ in pieces])


def _texts(value: object) -> Iterator[str]:
    """Yield the strings in a message or a tool, but for the role."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if key != "role":
                yield from _texts(each)
                yield from _texts(key)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
