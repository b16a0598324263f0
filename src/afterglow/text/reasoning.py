"""Reasoning in replies: how a model marks what it wrote for itself, told by its chat template, or as the operator says.

The text of a reply is split into reasoning and the rest as it arrives, before stop strings and calls are looked for in the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from afterglow.choices import ReasoningParserName
from afterglow.request import Content, Reasoning
from afterglow.text.chat_template import CHANNEL
from afterglow.text.tool_calls import harmony
from afterglow.text.tool_calls.parts import Buffer


@dataclass(frozen=True, slots=True)
class Mark:
    """Text that a parser needs, and in which no stop string is looked for."""

    text: str


Span = Reasoning | Content | Mark


class Splitter(ABC):
    """Splits one reply. Feed it with `push`, end with `flush`; the spans are in the order of the reply.

    `thinking`: the text so far ends within reasoning. `reasoned`: the reply has had reasoning, which may be empty.
    """

    def __init__(self, thinking: bool = False) -> None:
        self.thinking = self.reasoned = thinking
        self._buffer = Buffer()
        self._spans: list[Span] = []
        self._begun = False  # reasoning has had a character that is no white space
        self._space = ""  # white space within reasoning, which is dropped at its end

    def push(self, text: str) -> list[Span]:
        """Add text, and return the spans that have become certain."""
        self._buffer.text += text
        while self._step():
            pass
        return self._taken()

    def flush(self) -> list[Span]:
        """Return what is held back, where the reply has ended."""
        rest = self._buffer.take(len(self._buffer.text))
        if self.thinking:
            self._think(rest)
        else:
            self._say(rest)
        return self._taken()

    @abstractmethod
    def _step(self) -> bool:
        """Read on in the buffer. Returns False where more text is needed."""

    def _say(self, text: str, kind: Callable[[str], Span] = Content) -> None:
        if text:
            self._spans.append(kind(text))

    def _think(self, text: str) -> None:
        if not self._begun:
            text = text.lstrip()
        if text:
            self._begun = True
            text = self._space + text
            kept = text.rstrip()
            self._space = text[len(kept) :]
            self._say(kept, Reasoning)

    def _enter(self) -> None:
        self.thinking = self.reasoned = True
        self._space = "\n\n" if self._begun else ""  # between two pieces of reasoning

    def _leave(self) -> None:
        self.thinking, self._space = False, ""

    def _taken(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans


class TagSplitter(Splitter):
    """Reasoning between two marks at the beginning of the reply. Line breaks behind it belong to no part.

    `opened`: the prompt has begun the reasoning; then the reply may still repeat the mark.
    """

    def __init__(self, start: str, stop: str, *, opened: bool) -> None:
        super().__init__(opened)
        self._start, self._stop = start, stop
        self._step_now = self._beginning

    def _step(self) -> bool:
        return self._step_now()

    def _beginning(self) -> bool:
        text = self._buffer.text.lstrip()
        if text.startswith(self._start):
            self._buffer.text = text[len(self._start) :]
            self._enter()
        elif self._start.startswith(text):
            return False
        self._step_now = self._inside if self.thinking else self._rest
        return True

    def _inside(self) -> bool:
        read, mark = self._buffer.take_until((self._stop,))
        self._think(read)
        if mark is None:
            return False
        self._leave()
        self._step_now = self._gap
        return True

    def _gap(self) -> bool:
        self._buffer.text = self._buffer.text.lstrip("\r\n")
        if not self._buffer.text:
            return False
        self._step_now = self._rest
        return True

    def _rest(self) -> bool:
        self._say(self._buffer.take(len(self._buffer.text)))
        return False


class ChannelSplitter(Splitter):
    """Messages on the channel `analysis` are reasoning. The others stay as they are, for `HarmonyParser`."""

    def __init__(self) -> None:
        super().__init__()
        self._header = ""
        self._kind = ""  # of the message that is read: "analysis", "final" or "other"; empty within a header

    def _step(self) -> bool:
        if not self._kind:
            return self._read_header()
        read, mark = self._buffer.take_until(harmony.ENDS)
        if self._kind == "analysis":
            self._think(read)
        else:
            self._say(read, Content if self._kind == "final" else Mark)
        if mark is None:
            return False
        if self._kind == "analysis":
            self._leave()
        else:
            self._say(mark, Mark)
        self._kind = ""
        return True

    def _read_header(self) -> bool:
        read, mark = self._buffer.take_until((harmony.MESSAGE,))
        self._header += read
        if mark is None:
            return False
        header, self._header = self._header, ""
        channel, recipient = harmony.address(header)
        if channel == "analysis" and recipient is None:
            self._kind = "analysis"
            self._enter()
        else:
            self._kind = "final" if recipient is None else "other"
            self._say(header + mark, Mark)
        return True

    def flush(self) -> list[Span]:
        if not self._kind:
            self._say(self._header, Mark)
            self._header = ""
        return super().flush()


InGrammar = Callable[
    [str], str
]  # writes a mark in a grammar: as a token where it is a special one, and as text otherwise

_TAGS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
# In a chat template, the most telling first.
_TELLING: tuple[tuple[str, ReasoningParserName], ...] = (
    (CHANNEL, "openai"),
    ("[THINK]", "mistral"),
    ("</think>", "think"),
    ("<think>", "think"),
)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning. `special`: by special tokens, which must be decoded too."""

    name: ReasoningParserName
    special: bool

    def splitter(self, prompt: str, beginning: str = "") -> Splitter | None:
        """Make a splitter for one reply to a prompt; None where the prompt says that there is no reasoning. `beginning`: the content
        that the reply goes on from, with which the prompt ends; it may end within reasoning."""
        if self.name == "openai":
            return ChannelSplitter()
        start, stop = _TAGS[self.name]
        if beginning:
            said = beginning.rfind(start), beginning.rfind(stop)
            before = prompt[: len(prompt) - len(beginning.lstrip())].rstrip().endswith(start)
            opened = said[0] > said[1] if said != (-1, -1) else before
            return TagSplitter(start, stop, opened=True) if opened else None
        prompt = prompt[-256:].rstrip()
        return None if prompt.endswith(stop) else TagSplitter(start, stop, opened=prompt.endswith(start))

    def before_grammar(self, prompt: str, mark: InGrammar, *, headed: bool, beginning: str = "") -> str:
        """Write the Lark grammar of a reply to a prompt. Its part `@answer` follows a grammar of its own: what
        comes behind the reasoning. `headed`: that grammar begins with the header of a message. `beginning`: see `splitter`. Empty
        where the reply has no reasoning."""
        if self.name == "openai":
            channel, message = mark("<|channel|>"), mark("<|message|>")
            ended = f'{mark("<|end|>")} {mark("<|start|>")} "assistant"'
            head = "" if headed else f'{channel} "final" {message} '
            return f'start: thought* {head}@answer\nthought: {channel} "analysis" {message} /(?s:.*)/ {ended}\n'
        if (splitter := self.splitter(prompt, beginning)) is None:
            return ""
        start, stop = map(mark, _TAGS[self.name])
        if stop.startswith("<["):
            rules, thought = "", f"/(?s:.*)/ {stop} gap"
        else:
            rules, thought = f"thought[suffix={stop}]: /(?s:.*)/\n", "thought gap"
        begun = thought if splitter.thinking else f"({start} {thought})?"
        return f"start: {begun} @answer\n{rules}gap: /\\n{{0,2}}/\n"


def choose_reasoning(
    wanted: ReasoningParserName, template: str, is_special: Callable[[str], bool]
) -> ReasoningFormat | None:
    """Choose how a model marks its reasoning; None where it writes none. `template`: its chat template's source.
    `is_special`: is a text one of its special tokens?
    """
    if wanted == "auto":
        wanted = next((name for mark, name in _TELLING if mark in template), "none")
    if wanted == "none":
        return None
    return ReasoningFormat(wanted, wanted == "openai" or is_special(_TAGS[wanted][1]))
