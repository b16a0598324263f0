"""Reasoning told from the rest of a reply, wherever the text is cut."""

from __future__ import annotations

import json

import pytest

from afterglow.request import Content, Reasoning
from afterglow.text.reasoning import Mark, ReasoningFormat, Span, choose_reasoning

THINK = ReasoningFormat("think", False)
MISTRAL = ReasoningFormat("mistral", True)
CHANNELS = ReasoningFormat("openai", True)
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
# Format, prompt, reply; its reasoning, and the rest with its marks.
CASES = [
    (THINK, "user\n", "<think>\na b\n</think>\n\nc", "a b", "c"),
    (THINK, "user\n", "\n <think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
    (THINK, "user\n", "a <think>b</think>", "", "a <think>b</think>"),
    (THINK, "user\n", "<think>\n\n</think>\n\nc", "", "c"),
    (THINK, "user\n", "<thin", "", "<thin"),
    (THINK, "user\n", "  x", "", "  x"),
    (THINK, "user\n", "<think>a </thin", "a </thin", ""),
    (THINK, "user\n", "<think> a\n\n b ", "a\n\n b", ""),
    (THINK, "<think>\n", "a</think>\nb\n", "a", "b\n"),
    (THINK, "<think>\n", "<think>\na</think>  b", "a", "  b"),
    (THINK, "<think>\n", "a <think> b</think>c</think>", "a <think> b", "c</think>"),
    (THINK, "<think>\n", "", "", ""),
    (THINK, "<think>\n\n</think>\n\n", "<think>a</think>b", "", "<think>a</think>b"),
    (MISTRAL, "[/INST]", "[THINK]a[/THINK]b", "a", "b"),
    (MISTRAL, "[/INST]", "[TOOL_CALLS] []", "", "[TOOL_CALLS] []"),
    (CHANNELS, "", f"<|channel|>analysis<|message|>a <|end|><|start|>assistant{FINAL}b", "a", f"assistant{FINAL}b"),
    (CHANNELS, "", f"{FINAL}b", "", f"{FINAL}b"),
    (CHANNELS, "", "<|channel|>analysis<|message|>a", "a", ""),
    (CHANNELS, "", f"<|channel|>analysis<|message|>a<|end|><|start|>assistant{CALL}", "a", f"assistant{CALL}"),
    (
        CHANNELS,
        "",
        f"<|channel|>analysis<|message|>a<|end|><|channel|>analysis<|message|>b<|end|>{CALL}",
        "a\n\nb",
        CALL,
    ),
    (CHANNELS, "", "no channels", "", "no channels"),
]


@pytest.mark.parametrize(("style", "prompt", "reply", "reasoning", "rest"), CASES)
def test_wherever_the_text_is_cut(style: ReasoningFormat, prompt: str, reply: str, reasoning: str, rest: str) -> None:
    for first in range(len(reply) + 1):
        for step in (1, 2, 1000):
            splitter = style.splitter(prompt)
            if splitter is None:
                assert (reasoning, rest) == ("", reply)
                continue
            spans = splitter.push(reply[:first])
            for at in range(first, len(reply), step):
                spans += splitter.push(reply[at : at + step])
            spans += splitter.flush()
            assert text_of(spans, Reasoning) == reasoning
            assert text_of(spans, Content, Mark).removeprefix("<|start|>") == rest
            kinds = [isinstance(span, Reasoning) for span in spans]
            assert kinds == sorted(kinds, reverse=True)


def text_of(spans: list[Span], *kinds: type) -> str:
    return "".join(span.text for span in spans if isinstance(span, kinds))


def test_no_stop_string_is_looked_for_in_headers_and_calls() -> None:
    splitter = CHANNELS.splitter("")
    assert splitter is not None
    spans = [*splitter.push(f"{FINAL}text<|end|><|start|>assistant{CALL}"), *splitter.flush()]
    assert text_of(spans, Content) == "text"


def test_the_template_tells_the_format() -> None:
    for template, name in (
        ("{{ m.content.split('</think>')[-1] }}", "think"),
        ("<|im_start|>assistant\n<think>\n", "think"),
        ("[THINK]", "mistral"),
        ("<|channel|>analysis {# <think> #}", "openai"),
    ):
        found = choose_reasoning("auto", template, lambda text: text == "[/THINK]")
        assert found is not None
        assert (found.name, found.special) == (name, name != "think")
    assert choose_reasoning("auto", "{{ m.content }}", lambda text: False) is None
    assert choose_reasoning("none", "<think>", lambda text: False) is None
    assert choose_reasoning("think", "", lambda text: True) == ReasoningFormat("think", True)


def test_a_grammar_behind_reasoning_begins_as_the_prompt_says() -> None:
    def mark(text: str) -> str:
        return json.dumps(text)

    assert THINK.before_grammar("<think>\n\n</think>\n\n", mark, headed=False) == ""
    assert THINK.before_grammar("<think>\n", mark, headed=False).startswith("start: thought gap @answer")
    assert THINK.before_grammar("user\n", mark, headed=False).startswith('start: ("<think>" thought gap)? @answer')
    assert '"final"' in CHANNELS.before_grammar("", mark, headed=False)
    assert '"final"' not in CHANNELS.before_grammar("", mark, headed=True)
