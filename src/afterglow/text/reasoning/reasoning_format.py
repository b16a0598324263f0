"""How a model marks its reasoning: told by its chat template, or as the operator says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from afterglow.choices import ReasoningParserName
from afterglow.text.reasoning.splitters import ChannelSplitter, Splitter, TagSplitter

Mark = Callable[[str], str]  # writes a mark in a grammar: as a token where it is a special one, and as text otherwise

_TAGS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
# In a chat template, the most telling first.
_TELLING: tuple[tuple[str, ReasoningParserName], ...] = (
    ("<|channel|>", "openai"),
    ("[THINK]", "mistral"),
    ("</think>", "think"),
    ("<think>", "think"),
)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning. `special`: by special tokens, which must be decoded too."""

    name: ReasoningParserName
    special: bool

    def splitter(self, prompt: str) -> Splitter | None:
        """Make a splitter for one reply to a prompt; None where the prompt says that there is no reasoning."""
        if self.name == "openai":
            return ChannelSplitter()
        start, stop = _TAGS[self.name]
        prompt = prompt[-256:].rstrip()
        return None if prompt.endswith(stop) else TagSplitter(start, stop, opened=prompt.endswith(start))

    def before_grammar(self, prompt: str, mark: Mark, *, headed: bool) -> str:
        """Write the Lark grammar of a reply to a prompt, of which a part named `@answer` follows a grammar of its own: what
        comes behind the reasoning. `headed`: that grammar begins with the header of a message. Empty where the reply has no
        reasoning."""
        if self.name == "openai":
            channel, message = mark("<|channel|>"), mark("<|message|>")
            ended = f'{mark("<|end|>")} {mark("<|start|>")} "assistant"'
            head = "" if headed else f'{channel} "final" {message} '
            return f'start: thought* {head}@answer\nthought: {channel} "analysis" {message} /(?s:.*)/ {ended}\n'
        if (splitter := self.splitter(prompt)) is None:
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
