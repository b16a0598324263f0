"""The tokens that all conversations with a system prompt begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from afterglow.errors import RequestError
from afterglow.text import Tokenizer
from afterglow.text.next_turn import system_prefix
from tests.text import toys
from tests.text.test_turns import FOLDED

TEXTS = ("Be kind.", "Ends with a space ", "A list:\n- one\n- two", "Grüße 🙂", "<|im_end|> is how a message ends", "1")
FOLLOWING = ("Hello", " and so on", "\n", "2", "<|im_end|>", "ß")


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(toys.byte_level(tmp_path_factory.mktemp("chatml")))


@pytest.mark.parametrize("text", TEXTS)
def test_every_conversation_begins_with_them(chatml: Tokenizer, text: str) -> None:
    prefix = system_prefix(chatml, text)
    for said in FOLLOWING:
        for more in ([], [{"role": "assistant", "content": said}, {"role": "user", "content": "x"}]):
            messages = [{"role": "system", "content": text}, {"role": "user", "content": said}, *more]
            prompt = chatml.encode_chat(messages, cut_over=0)
            assert prompt.ids[: len(prefix)] == prefix
            assert prompt.turns[0] >= len(prefix), "truncation would cut into it"


@pytest.mark.parametrize("text", TEXTS)
def test_they_say_all_of_the_prompt_and_no_other_one(chatml: Tokenizer, text: str) -> None:
    prefix = system_prefix(chatml, text)
    assert chatml.decode(prefix, False).rstrip() == f"<|im_start|>system\n{text}<|im_end|>"
    for other in (text + "!", text + " and", text[:-1]):
        messages = [{"role": "system", "content": other}, {"role": "user", "content": "Hello"}]
        assert chatml.encode_chat(messages).ids[: len(prefix)] != prefix


def test_a_second_system_message_may_follow(chatml: Tokenizer) -> None:
    prefix = system_prefix(chatml, "Be kind.", others_follow=True)
    messages = [{"role": role, "content": "Be quick."} for role in ("system", "user")]
    messages = [{"role": "system", "content": "Be kind."}, *messages]
    assert chatml.encode_chat(messages).ids[: len(prefix)] == prefix


ONE_SYSTEM = (
    "{% for m in messages %}{% if m['role'] != 'system' or loop.first %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endif %}{% endfor %}"
)
SILENT = "{% for m in messages %}{% if m['role'] != 'system' %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "others_follow", "named"),
    [
        (FOLDED, False, "no special token between"),
        (PLAIN, False, "no special token between"),
        (SILENT, False, "no special token between"),
        (ONE_SYSTEM, True, "only one system message"),
    ],
)
def test_a_template_without_such_a_place_is_refused(
    tmp_path: Path, template: str, others_follow: bool, named: str
) -> None:
    tokenizer = Tokenizer(toys.byte_level(tmp_path, template=template))
    with pytest.raises(RequestError, match=named):
        system_prefix(tokenizer, "Be kind.", others_follow=others_follow)


def test_what_the_template_itself_refuses_is_said(tmp_path: Path) -> None:
    tokenizer = Tokenizer(toys.metaspace(tmp_path))
    with pytest.raises(RequestError, match="Only user and assistant roles are supported"):
        system_prefix(tokenizer, "Be kind.")


def test_the_beginning_of_text_is_there_once() -> None:
    folder = Path(__file__).parents[2] / "src/afterglow/assets/model"
    if not (folder / "config.json").is_file():
        pytest.skip("no bundled model here")
    tokenizer = Tokenizer(folder)
    prefix = system_prefix(tokenizer, "Be kind.")
    bos = toys.token_id(tokenizer, tokenizer.special_tokens["bos_token"])
    assert prefix.count(bos) == 1 == prefix.index(bos) + 1
