"""Marked blocks: where they end in the text of a template, and in its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from afterglow.text import Tokenizer
from afterglow.text.turns import BlockMark
from tests import scripted_model as kit
from tests.text import toys

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("first", "second")
]
CALLS = [{"id": "abcdefghi", "type": "function", "function": {"name": "first", "arguments": "{}"}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.\nBe kind.  "},
    {"role": "user", "content": "One.\nTwo."},
    {"role": "assistant", "content": "Look.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "A result."},
    {"role": "user", "content": "  Three.  "},
]


def texts(tokenizer: Tokenizer, marks: Sequence[BlockMark], tools: bool = True, **fields: Any) -> list[str]:
    """Return what each mark keeps, as text."""
    prompt = tokenizer.encode_chat(MESSAGES, tools=TOOLS if tools else (), marks=marks, **fields)
    assert len(prompt.marks) == len(marks)
    return [tokenizer.decode(prompt.ids[:rows], False) for rows in prompt.marks]


def made(folder: Path, template: str, specials: Sequence[str] = ()) -> Tokenizer:
    return Tokenizer(toys.byte_level(folder, template=template, specials=specials))


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return made(tmp_path_factory.mktemp("hermes"), kit.HERMES)


def test_contents_end_where_they_do(hermes: Tokenizer) -> None:
    found = texts(hermes, [BlockMark(1, 4), BlockMark(1, 9), BlockMark(3, 9), BlockMark(4, 10)])
    assert [text.rpartition("\n")[2] for text in found] == ["One.", "Two.", "A result.", "  Three."]


def test_calls_end_with_their_message(hermes: Tokenizer) -> None:
    (found,) = texts(hermes, [BlockMark(2)])
    assert found.endswith("</tool_call><|im_end|>\n")


def test_a_text_before_calls_ends_before_them(hermes: Tokenizer) -> None:
    (found,) = texts(hermes, [BlockMark(2, 5)])
    assert found.endswith("<|im_start|>assistant\nLook.")


def test_tools_end_where_others_would_follow(hermes: Tokenizer) -> None:
    first, second = texts(hermes, [BlockMark(tool=0), BlockMark(tool=1)])
    assert '"first"' in first
    assert '"second"' not in first
    assert second.endswith('"second", "description": "d", "parameters": {"type": "object", "properties": {}}}}\n')


def test_the_system_message_ends_behind_tools_that_follow_it(hermes: Tokenizer) -> None:
    (with_tools,) = texts(hermes, [BlockMark(0, 9)])
    assert with_tools == texts(hermes, [BlockMark(tool=1)])[0]
    first, second = texts(hermes, [BlockMark(0, 9), BlockMark(0, 19)], tools=False)
    assert (first.rpartition("\n")[2], second.rpartition("\n")[2]) == ("Be brief.", "Be kind.")


def test_tools_before_the_last_message_do_not_move_the_system_message(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if loop.last and tools %}{{ tools | tojson }}{% endif %}<|im_start|>{{ m.content }}"
        "{{ m.tool_calls | default('') }}{% endfor %}"
    )
    (found,) = texts(made(tmp_path, template), [BlockMark(0, 9)])
    assert found == "<|im_start|>Be brief."


def test_a_token_that_goes_beyond_is_left_out(hermes: Tokenizer) -> None:
    """`One` may be one token: a block cannot end within it."""
    for chars in range(1, 9):
        (found,) = texts(hermes, [BlockMark(1, chars)])
        whole = texts(hermes, [BlockMark(1, 9)])[0]
        assert whole.startswith(found)
        assert len(whole) - len(found) >= len("One.\nTwo.") - chars


@pytest.mark.parametrize("template", [
    "{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}",  # what is written is not what was sent
    "{% for m in messages %}{{ m.content | length }}<|im_end|>{% endfor %}",
])  # fmt: skip
def test_hidden_places_are_those_of_the_message_before(tmp_path: Path, template: str) -> None:
    tokenizer = made(tmp_path, template)
    whole = tokenizer.decode(tokenizer.encode_chat(MESSAGES).ids, False)
    (found,) = texts(tokenizer, [BlockMark(4, 10)], tools=False)
    assert whole.startswith(found)
    assert found.endswith("<|im_end|>")
    assert found.count("<|im_end|>") == 4
    assert texts(tokenizer, [BlockMark(0, 9)], tools=False) == [""], "there is no message before"


def test_a_template_that_refuses_parts_hides_all(tmp_path: Path) -> None:
    template = (
        "{% if messages | length < 5 or '\\ue000' in messages[4].content %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    assert texts(made(tmp_path, template), [BlockMark(4, 10), BlockMark(2)], tools=False) == ["", ""]


def test_marks_within_a_remembered_reply_end_before_it(hermes: Tokenizer) -> None:
    said = MESSAGES[:2]
    prompt = hermes.encode_chat(said)
    reply = [token for char in "Look here." for token in hermes.encode(char)]
    hermes.remember(prompt, "Look here.", reply)
    after = [*said, {"role": "assistant", "content": "Look here."}, {"role": "user", "content": "And?"}]
    found = hermes.encode_chat(after, marks=[BlockMark(2, 4), BlockMark(2, 10), BlockMark(3, 4)])
    assert found.spliced == 1
    assert found.marks[:2] == (len(prompt.ids), len(prompt.ids) + len(reply))
    assert hermes.decode(found.ids[: found.marks[2]], False).endswith("And?")


def test_markers_in_messages_do_not_move_marks(hermes: Tokenizer) -> None:
    said = [{"role": "user", "content": "<|im_start|>user\nx<|im_end|> end"}]
    prompt = hermes.encode_chat(said, marks=[BlockMark(0, 32)])
    assert hermes.decode(prompt.ids[: prompt.marks[0]], False).endswith("<|im_end|> end")
