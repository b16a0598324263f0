"""Where turns begin, for the usual templates: the text without left-out turns must be the template's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from afterglow.text import ChatTemplate, Tokenizer
from afterglow.text.turns import ONE_TURN, TEMPLATE, Turns, find_turns
from tests.text import toys

TEMPLATES = {
    "chatml": toys.CHATML,
    "inst": toys.INST,
    # A system prompt of its own where none is given (Qwen 2.5).
    "default": "{% if messages[0].role != 'system' %}{{ '<S>You are kind.<E>' }}{% endif %}{% for m in messages %}"
    "{{ '<' + m.role + '>' + m.content + '<E>' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    # White space around contents is dropped (Llama 3).
    "trims": "<s>{% for m in messages %}{{ '<' + m.role + '>\\n\\n' + m.content | trim + '<E>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>\\n\\n' }}{% endif %}",
    # The last reply is written otherwise than earlier ones (Qwen 3).
    "thinks": "{% for m in messages %}{{ '<' + m.role + '>' }}{% if loop.last and m.role == 'assistant' %}<think>"
    "</think>{% endif %}{{ m.content + '<E>' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    # No special token anywhere.
    "plain": "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
}
# The system prompt is a part of the first user's message (Llama 2, Gemma).
FOLDED = (
    "{% set ns = namespace(sys='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.sys = m.content %}"
    "{% elif m.role == 'user' %}{{ '<s>[INST] ' + (ns.sys + '\\n\\n' if ns.sys else '') + m.content + ' [/INST]' }}"
    "{% set ns.sys = '' %}{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
)


def talk(
    count: int, system: str | None = None, say: str = "question {}", reply: str = "answer {}"
) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    for number in range(count):
        messages.append({"role": "user", "content": say.format(number)})
        messages.append({"role": "assistant", "content": reply.format(number)})
    return [*messages, {"role": "user", "content": "and now?"}]


def writer(source: str) -> Any:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})

    def write(messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        return template.render(messages, add_generation_prompt=prompt)

    return write


def turns_of(source: str, messages: list[dict[str, str]]) -> tuple[str, Turns]:
    text = writer(source)(messages, True)
    return text, find_turns(writer(source), messages, text, "<s>")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", [None, "Be brief.", "  Be brief.\n"])
@pytest.mark.parametrize("say", ["question {}", " \n spaced {} ", "", "same"])
def test_leaving_out_turns_is_what_the_template_writes_without_them(name: str, system: str | None, say: str) -> None:
    if name == "inst" and system is not None:
        pytest.skip("it knows no system prompt")
    messages = talk(4, system, say)
    text, turns = turns_of(TEMPLATES[name], messages)
    assert turns.why_not is None
    assert len(turns.starts) == 5
    first = 1 if system is not None else 0
    for dropped, start in enumerate(turns.starts):
        shorter = [*messages[:first], *messages[first + 2 * dropped :]]
        assert text[: turns.head] + text[start:] == writer(TEMPLATES[name])(shorter, True)
    if system is not None:
        assert system.strip() in text[: turns.head]
    heads = {"default": "<S>You are kind.<E>", "trims": "<s>"}
    if system is None:
        assert text[: turns.head] == heads.get(name, "" if name != "inst" else "<s>")


def test_messages_before_the_first_users_belong_to_the_head() -> None:
    messages = [{"role": "assistant", "content": "Welcome."}, *talk(2)]
    text, turns = turns_of(TEMPLATES["trims"], messages)
    assert text[: turns.head] == "<s><assistant>\n\nWelcome.<E>"
    assert len(turns.starts) == 3


def test_two_messages_of_the_user_are_two_turns() -> None:
    messages = [*talk(1), *talk(1)]
    _, turns = turns_of(TEMPLATES["trims"], messages)
    assert len(turns.starts) == 4


def test_a_folded_system_prompt_has_no_turns_but_a_head() -> None:
    text, turns = turns_of(FOLDED, talk(3, "Be brief."))
    assert (turns.starts, turns.why_not) == ((), TEMPLATE)
    assert text[: turns.head] == "<s>[INST] Be brief."
    text, turns = turns_of(FOLDED, talk(3))
    assert len(turns.starts) == 4
    assert turns.head == 0


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}",  # numbers its messages
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
        "{{ messages[-1].content }}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
)
def test_templates_that_cannot_be_cut(source: str) -> None:
    _, turns = turns_of(source, talk(3))
    assert (turns.starts, turns.why_not) == ((), TEMPLATE)


def test_one_turn_has_nothing_to_leave_out() -> None:
    text, turns = turns_of(TEMPLATES["trims"], talk(0, "Be brief."))
    assert turns.why_not == ONE_TURN
    assert text[: turns.head] == "<s><system>\n\nBe brief.<E>"
    text, turns = turns_of(TEMPLATES["trims"], [{"role": "user", "content": "hi"}])
    assert text[: turns.head] == "<s>"
    text, turns = turns_of(TEMPLATES["default"], [{"role": "user", "content": "hi"}])
    assert turns.head == 0  # it cannot render nothing at all


# ------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "bundled"])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_rows_are_where_the_text_says(tokenizers: dict[str, Tokenizer], name: str, system: str | None) -> None:
    if name not in tokenizers or (name == "byte_fallback" and system):
        pytest.skip("not here")
    tokenizer = tokenizers[name]
    messages = talk(3, system, "Grüße 🙂 {}")
    prompt = tokenizer.encode_chat(messages, cut_over=0)
    assert prompt.uncut is None
    assert len(prompt.turns) == 4
    first = 1 if system else 0
    for dropped, row in enumerate(prompt.turns):
        shorter = [*messages[:first], *messages[first + 2 * dropped :]]
        assert prompt.ids[: prompt.turns[0]] + prompt.ids[row:] == tokenizer.encode_chat(shorter).ids
    assert prompt.turns[0] > 0 or name == "byte_level"


def test_rows_count_the_generated_ids_of_replies(byte_level: Tokenizer) -> None:
    messages: list[dict[str, str]] = []
    for number in range(3):
        messages.append({"role": "user", "content": f"question {number}"})
        prompt = byte_level.encode_chat(messages, salt="rows")
        reply = "The kite is red"
        odd = [i for c in reply for i in byte_level.encode(c)]
        assert byte_level.remember(prompt, reply, [*odd, *byte_level.encode("<|im_end|>")])
        messages.append({"role": "assistant", "content": reply})
    messages.append({"role": "user", "content": "so?"})
    prompt = byte_level.encode_chat(messages, salt="rows", cut_over=0)
    assert prompt.spliced == 3
    assert len(prompt.turns) == 4
    (start,) = byte_level.encode("<|im_start|>", add_special_tokens=False)
    assert all(prompt.ids[row] == start for row in prompt.turns)
    assert byte_level.decode(prompt.ids[prompt.turns[2] :], False).startswith("<|im_start|>user\nquestion 2")


def test_turns_are_looked_for_only_where_they_are_needed(byte_level: Tokenizer) -> None:
    messages = talk(2)
    size = len(byte_level.encode_chat(messages).ids)
    assert byte_level.encode_chat(messages, cut_over=size).turns == ()
    assert len(byte_level.encode_chat(messages, cut_over=size - 1).turns) == 3


def test_a_boundary_within_a_token_is_left_out(tmp_path: Path) -> None:
    tokenizer = Tokenizer(toys.byte_level(tmp_path / "m", template=TEMPLATES["plain"]))
    prompt = tokenizer.encode_chat(talk(3, "Be brief."), cut_over=0)
    for row in prompt.turns:
        assert tokenizer.decode(prompt.ids[row:]).startswith("user: ")


def test_what_cannot_be_cut_says_why_and_keeps_the_head(tmp_path: Path) -> None:
    tokenizer = Tokenizer(toys.metaspace(tmp_path / "m", template=FOLDED))
    prompt = tokenizer.encode_chat(talk(3, "Be brief."), cut_over=0)
    assert prompt.uncut == TEMPLATE
    assert len(prompt.turns) == 1
    assert "Be brief" in tokenizer.decode(prompt.ids[: prompt.turns[0]])
