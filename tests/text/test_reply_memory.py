"""Replies that come back as text get the ids they were generated with."""

from __future__ import annotations

import pytest

from afterglow.request import ToolCall
from afterglow.text import ChatPrompt, Reply, ReplyMemory, Tokenizer
from tests.text import toys

USER = {"role": "user", "content": "What colour is the kite?"}
NEXT = {"role": "user", "content": "Why?"}


def odd_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids that decode to `text` and are not the tokenizer's own choice: one per character."""
    ids = [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]
    assert ids != tokenizer.encode(text, add_special_tokens=False)
    return ids


def end_of(tokenizer: Tokenizer) -> int:
    end = toys.token_id(tokenizer, tokenizer.special_tokens["eos_token"])
    assert end is not None
    return end


def test_the_generated_ids_are_spliced(byte_level: Tokenizer) -> None:
    first = byte_level.encode_chat([USER])
    generated = [*odd_ids(byte_level, "The kite is red"), end_of(byte_level)]
    assert byte_level.remember(first, "The kite is red", generated)
    messages = [USER, {"role": "assistant", "content": "The kite is red"}, NEXT]
    second = byte_level.encode_chat(messages)
    assert (second.spliced, second.retokenised) == (1, 0)
    assert second.ids[: len(first.ids) + len(generated)] == [*first.ids, *generated]
    # It is still the same text, and goes on as tokenising it anew would.
    assert byte_level.decode(second.ids, False) == second.text
    anew = byte_level.encode(second.text)
    tail = second.ids[len(first.ids) + len(generated) :]
    assert anew[-len(tail) :] == tail


def test_several_turns_stay_a_prefix_of_each_other(byte_level: Tokenizer) -> None:
    messages = [USER]
    before: list[int] = []
    for turn in range(5):
        prompt = byte_level.encode_chat(messages, salt="several")
        assert prompt.ids[: len(before)] == before
        assert prompt.spliced == turn
        reply = f"reply number {turn} is odd"
        generated = [*odd_ids(byte_level, reply), end_of(byte_level)]
        assert byte_level.remember(prompt, reply, generated)
        before = [*prompt.ids, *generated]
        messages = [*messages, {"role": "assistant", "content": reply}, NEXT]


def test_a_reply_that_was_cut_off_is_spliced_before_the_templates_own_end(byte_level: Tokenizer) -> None:
    prompt = byte_level.encode_chat([USER], salt="cut")
    generated = odd_ids(byte_level, "The ki")
    assert byte_level.remember(prompt, "The ki", generated)
    after = byte_level.encode_chat([USER, {"role": "assistant", "content": "The ki"}, NEXT], salt="cut")
    assert after.spliced == 1
    assert after.ids[: len(prompt.ids) + len(generated) + 1] == [*prompt.ids, *generated, end_of(byte_level)]


def test_a_stop_string_cuts_the_ids_too(byte_level: Tokenizer) -> None:
    prompt = byte_level.encode_chat([USER], salt="stop")
    generated = odd_ids(byte_level, "red STOP more")
    assert byte_level.remember(prompt, "red ", generated)
    after = byte_level.encode_chat([USER, {"role": "assistant", "content": "red "}, NEXT], salt="stop")
    assert after.ids[: len(prompt.ids) + 5] == [*prompt.ids, *generated[:4], end_of(byte_level)]


def test_a_text_that_ends_within_a_token_is_not_remembered(byte_level: Tokenizer) -> None:
    prompt = byte_level.encode_chat([USER], salt="within")
    kite = byte_level.encode(" kite")
    assert len(kite) == 1
    assert not byte_level.remember(prompt, " ki", kite)


def test_hidden_special_tokens_are_not_remembered(byte_level: Tokenizer) -> None:
    prompt = byte_level.encode_chat([USER], salt="hidden")
    hidden = toys.token_id(byte_level, "<|im_start|>")
    assert hidden is not None
    ids = [*byte_level.encode("re"), hidden, *byte_level.encode("d")]
    assert not byte_level.remember(prompt, "red", ids)


@pytest.mark.parametrize(
    ("messages", "salt"),
    [
        ([USER, {"role": "assistant", "content": "The kite is blue"}, NEXT], "a"),  # another text
        ([NEXT, {"role": "assistant", "content": "The kite is red"}, NEXT], "a"),  # another prompt
        ([USER, {"role": "assistant", "content": "The kite is red"}, NEXT], "b"),  # another tenant
    ],
)
def test_anything_else_is_tokenised_anew(byte_level: Tokenizer, messages: list[dict[str, str]], salt: str) -> None:
    prompt = byte_level.encode_chat([USER], salt="a")
    assert byte_level.remember(prompt, "The kite is red", odd_ids(byte_level, "The kite is red"))
    got = byte_level.encode_chat(messages, salt=salt)
    assert (got.spliced, got.retokenised) == (0, 1)
    assert got.ids == byte_level.encode(got.text)


def test_a_template_that_changes_the_reply_is_respected(llama: Tokenizer) -> None:
    """Llama 2's template writes a space before the end token: no special token follows the reply."""
    prompt = llama.encode_chat([USER])
    assert llama.remember(prompt, " red", llama.encode("red", add_special_tokens=False))
    got = llama.encode_chat([USER, {"role": "assistant", "content": " red"}, NEXT])
    assert got.spliced == 0
    assert got.ids == llama.encode(got.text, add_special_tokens=False)


def test_a_reply_in_parts_comes_back_from_a_store(byte_level: Tokenizer) -> None:
    prompt = byte_level.encode_chat([USER], salt="parts")
    generated = [*odd_ids(byte_level, '<tool_call>{"name":"f"}</tool_call>'), end_of(byte_level)]
    call = ToolCall("id", "f", "{}", True)
    text = byte_level.decode(generated)
    kept = byte_level.remember(prompt, text, generated, content="", calls=[call])
    assert kept is not None
    assert Reply.from_json("", kept.as_json()) == kept
    said = {"id": "x", "type": "function", "function": {"name": "f", "arguments": " { } "}}
    message = {"role": "assistant", "content": None, "tool_calls": [said]}
    result = {"role": "tool", "tool_call_id": "x", "content": "y"}
    again = byte_level.encode_chat([USER, message, result], salt="parts")
    assert (again.spliced, again.retokenised) == (1, 0)
    assert again.ids[: len(prompt.ids) + len(generated)] == [*prompt.ids, *generated]
    other = {**message, "tool_calls": [{**said, "function": {"name": "g", "arguments": "{}"}}]}
    assert byte_level.encode_chat([USER, other, result], salt="parts").spliced == 0


def test_the_memory_is_bounded_and_forgets_the_oldest() -> None:
    memory = ReplyMemory(max_tokens=2 * (3 + 64) + 2)

    def prompt(name: str) -> ChatPrompt:
        return ChatPrompt([1], name, "", name.encode())

    for name in "abc":
        memory.put(prompt(name), "xxx", [1, 2, 3], None)
        memory.get(b"a")
    assert memory.tokens <= 2 * (3 + 64) + 2
    assert memory.get(b"b") is None
    assert memory.get(b"a") is not None
    memory.put(prompt("a"), "y", [1], None)
    assert (len(memory), memory.tokens) == (2, 3 + 1 + 2 * 64)
    memory.clear()
    assert (len(memory), memory.tokens) == (0, 0)


def test_short_replies_cost_more_than_their_ids() -> None:
    memory = ReplyMemory(max_tokens=6400)
    for number in range(1000):
        memory.put(ChatPrompt([1], "", "", b"%d" % number), "x", [1], None)
    assert len(memory) < 100
