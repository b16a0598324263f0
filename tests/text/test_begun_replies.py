"""A reply that goes on from the beginning that a client gives: the prompt's text, and the ids that come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from afterglow.errors import RequestError
from afterglow.text import Reply, Tokenizer
from afterglow.text.next_turn import next_prompts
from afterglow.text.turns import BlockMark
from tests import reasoning_templates, scripted_model
from tests.text import toys
from tests.text.test_reply_memory import NEXT, USER, end_of, odd_ids

BEGUN = {"role": "assistant", "content": "The kite"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEMPLATES = [toys.CHATML, scripted_model.HERMES, scripted_model.LLAMA, reasoning_templates.QWEN]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("content", ["The kite", " a", "So:\n\n1.", "{", "<|im_end|> is a marker"])
def test_the_prompt_ends_as_transformers_has_it(tmp_path: Path, template: str, content: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = toys.byte_level(tmp_path, template=template)
    tokenizer = Tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [USER, {"role": "assistant", "content": "Red."}, NEXT, {"role": "assistant", "content": content}]
    wanted = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=False, continue_final_message=True
    )
    assert tokenizer.encode_chat(messages, continue_final_message=True).text == wanted


def test_white_space_at_the_end_is_kept(tmp_path: Path) -> None:
    trims = toys.CHATML.replace("m['content']", "(m['content'] | trim)")
    tokenizer = Tokenizer(toys.byte_level(tmp_path, template=trims))
    messages = [USER, {"role": "assistant", "content": " The kite \n"}]
    assert tokenizer.encode_chat(messages, continue_final_message=True).text.endswith("assistant\nThe kite \n")


def test_ids_of_the_whole_reply_come_back(byte_level: Tokenizer) -> None:
    first = byte_level.encode_chat([USER, BEGUN], salt="begun", continue_final_message=True)
    assert (first.spliced, first.retokenised) == (0, 0)
    assert first.ids == byte_level.encode(first.text)
    generated = [*odd_ids(byte_level, " is red"), end_of(byte_level)]
    kept = byte_level.remember(first, " is red", generated)
    assert kept is not None
    assert Reply.from_json(kept.text, kept.as_json()) == kept
    whole = {"role": "assistant", "content": "The kite is red"}
    second = byte_level.encode_chat([USER, whole, NEXT], salt="begun")
    assert (second.spliced, second.retokenised) == (1, 0)
    assert second.ids[: len(first.ids) + len(generated)] == [*first.ids, *generated]


def test_a_reply_that_was_cut_off_goes_on_from_its_own_ids(byte_level: Tokenizer) -> None:
    """Twice, so that a part is the client's and two parts are generated."""
    first = byte_level.encode_chat([USER, BEGUN], salt="twice", continue_final_message=True)
    ids, content = list(first.ids), "The kite"
    for part in (" is red", " and the mill"):
        prompt = byte_level.encode_chat(
            [USER, {"role": "assistant", "content": content}], salt="twice", continue_final_message=True
        )
        assert prompt.ids == ids
        assert prompt.text.endswith(content)
        generated = odd_ids(byte_level, part)
        assert byte_level.remember(prompt, part, generated)
        ids, content = [*ids, *generated], content + part
    after = byte_level.encode_chat([USER, {"role": "assistant", "content": content}, NEXT], salt="twice")
    assert (after.spliced, after.retokenised) == (1, 0)
    assert after.ids[: len(ids) + 1] == [*ids, end_of(byte_level)]


def test_a_reply_that_a_client_has_changed_is_tokenised_anew(byte_level: Tokenizer) -> None:
    prompt = byte_level.encode_chat([USER], salt="changed")
    assert byte_level.remember(prompt, "The kite is red", odd_ids(byte_level, "The kite is red"))
    changed = [USER, {"role": "assistant", "content": "The kite is re"}]
    got = byte_level.encode_chat(changed, salt="changed", continue_final_message=True)
    assert got.spliced == 0
    assert got.ids == byte_level.encode(got.text)


def test_a_marker_that_two_parts_write_together_is_text_once(byte_level: Tokenizer) -> None:
    begun = {"role": "assistant", "content": "Write <|im_"}
    prompt = byte_level.encode_chat([USER, begun], salt="marker", continue_final_message=True)
    assert byte_level.remember(prompt, "end|> now", odd_ids(byte_level, "end|> now"))
    whole = {"role": "assistant", "content": "Write <|im_end|> now"}
    got = byte_level.encode_chat([USER, whole, NEXT], salt="marker")
    assert byte_level.decode(got.ids, False) == got.text
    assert got.ids.count(end_of(byte_level)) == 3, "the ends of three messages"


@pytest.mark.parametrize(("template", "spliced"), [(reasoning_templates.QWEN, 0), (reasoning_templates.KEPT, 1)])
def test_a_reply_with_reasoning_goes_on_from_its_own_ids(tmp_path: Path, template: str, spliced: int) -> None:
    """Later the template may leave the reasoning out, and the ids would say more than it does."""
    tokenizer = Tokenizer(toys.byte_level(tmp_path, template=template))
    first = tokenizer.encode_chat([USER])
    gap = "\n\n" if template is reasoning_templates.QWEN else "\n"
    text = f"<think>\nHm.\n</think>{gap}The kite"
    generated = odd_ids(tokenizer, text)
    assert tokenizer.remember(first, text, generated, content="The kite", reasoning="Hm.")
    begun = {**BEGUN, "reasoning_content": "Hm."}
    second = tokenizer.encode_chat([USER, begun], continue_final_message=True)
    assert second.ids == [*first.ids, *generated]
    more = odd_ids(tokenizer, " is red")
    assert tokenizer.remember(second, " is red", more, content=" is red")
    whole = {**begun, "content": "The kite is red"}
    third = tokenizer.encode_chat([USER, whole, NEXT])
    assert third.spliced == spliced
    if spliced:
        assert third.ids[: len(second.ids) + len(more)] == [*second.ids, *more]
    assert tokenizer.remember(second, " is", more, content=" is", reasoning="Hm again.") is None


def test_a_beginning_with_reasoning_comes_back_with_the_reply(tmp_path: Path) -> None:
    tokenizer = Tokenizer(toys.byte_level(tmp_path, template=reasoning_templates.KEPT))
    begun = {**BEGUN, "reasoning_content": "Hm."}
    prompt = tokenizer.encode_chat([USER, begun], continue_final_message=True)
    generated = odd_ids(tokenizer, " is red")
    assert tokenizer.remember(prompt, " is red", generated, content=" is red")
    got = tokenizer.encode_chat([USER, {**begun, "content": "The kite is red"}, NEXT])
    assert (got.spliced, got.ids[: len(prompt.ids) + len(generated)]) == (1, [*prompt.ids, *generated])


def test_turns_and_marks_are_those_of_the_prompt(byte_level: Tokenizer) -> None:
    said = [USER, {"role": "assistant", "content": "Red."}, NEXT, BEGUN]
    got = byte_level.encode_chat(said, continue_final_message=True, cut_over=0)
    assert got.uncut is None
    assert len(got.turns) == 2
    tail = byte_level.decode(got.ids[got.turns[1] :], False)
    assert tail == byte_level.encode_chat([NEXT, BEGUN], continue_final_message=True).text
    marked = byte_level.encode_chat(said, continue_final_message=True, marks=[BlockMark(2), BlockMark(3, 3)])
    ends = [byte_level.decode(marked.ids[:rows], False) for rows in marked.marks]
    assert ends[0].endswith("Why?<|im_end|>\n")
    assert ends[1].endswith("assistant\nThe")


def test_the_next_turn_has_the_whole_reply(tmp_path: Path) -> None:
    tokenizer = Tokenizer(toys.byte_level(tmp_path, template=reasoning_templates.QWEN))
    prompt = tokenizer.encode_chat([USER, BEGUN], continue_final_message=True)
    (ids,) = next_prompts(tokenizer, prompt, odd_ids(tokenizer, " is red"), " is red")
    whole = {"role": "assistant", "content": "The kite is red"}
    text = tokenizer.encode_chat([USER, whole, NEXT], add_generation_prompt=False).text
    assert text.startswith(tokenizer.decode(ids, False))
    assert "The kite is red" in tokenizer.decode(ids, False)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([USER], r"messages\[0\]: only an assistant's message can be continued, and the last one has the role 'user'"),
        ([USER, {"role": "assistant", "content": ""}], r"messages\[1\] has no content"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "with calls"),
    ],
)
def test_what_cannot_go_on_is_refused(byte_level: Tokenizer, messages: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        byte_level.encode_chat(messages, continue_final_message=True)


def test_templates_that_cannot_end_in_a_reply_are_told(tmp_path: Path) -> None:
    for number, (template, says) in enumerate(
        [
            ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves out a part"),
            (reasoning_templates.R1, r"leaves out a part of the message to continue \(thoughts, say\)"),
            (reasoning_templates.HARMONY, "in channels"),
        ]
    ):
        tokenizer = Tokenizer(toys.byte_level(tmp_path / str(number), template=template))
        begun = {"role": "assistant", "content": "<think>\nShort.\n</think>\n\nThe kite"}
        with pytest.raises(RequestError, match=says):
            tokenizer.encode_chat([USER, begun], continue_final_message=True)
