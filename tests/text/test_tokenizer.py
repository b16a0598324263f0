"""The tokenizer against `transformers`, and the messages for directories without one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from afterglow.errors import ModelError, RequestError
from afterglow.text import Tokenizer
from tests.text import toys

MESSAGES = [
    {"role": "user", "content": "What colour is the kite?"},
    {"role": "assistant", "content": "It is red."},
    {"role": "user", "content": "Grüße 🙂  and\ttabs"},
]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "metaspace", "bundled"])
def test_same_ids_as_transformers(folders: dict[str, Path], name: str) -> None:
    if name not in folders:
        pytest.skip("no bundled model in this checkout")
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folders[name])
    ours = Tokenizer(folders[name])
    for text in [*toys.CORPUS[:4], "", " ", "a" * 500, "<s>x</s> <|im_end|> y"]:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    wanted = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert ours.encode_chat(MESSAGES).text == wanted
    assert ours.encode_chat(MESSAGES).ids == theirs(wanted, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_token_bytes_add_up_to_the_text(tokenizers: dict[str, Tokenizer], name: str) -> None:
    for text in toys.CORPUS[:4]:
        ids = tokenizers[name].encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizers[name].token_bytes, ids)).decode()
        assert joined.removeprefix(" ") == text


def test_ids_beyond_the_tokenizer_stand_for_nothing(byte_level: Tokenizer) -> None:
    assert byte_level.token_bytes(byte_level.vocab_size + 7) == b""
    assert byte_level.decode([byte_level.vocab_size + 7]) == ""


def test_special_tokens_known_only_to_the_configuration_are_added(tmp_path: Path) -> None:
    folder = toys.byte_level(tmp_path / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"400": {"content": "<|tool|>", "special": True, "normalized": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(folder)
    assert tokenizer.token_bytes(tokenizer.encode("a<|tool|>b")[1]) == b"<|tool|>"
    assert tokenizer.decode(tokenizer.encode("a<|tool|>b")) == "ab"


def test_lone_surrogates_are_no_text(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode("a\ud800b")) == "a?b"


def test_truncation_of_the_file_is_ignored(tmp_path: Path) -> None:
    folder = toys.byte_level(tmp_path / "m")
    state = json.loads((folder / "tokenizer.json").read_text())
    state["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    assert len(Tokenizer(folder).encode("the mill is near the river, the boat is blue")) > 4


def test_missing_or_broken_files_are_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a model directory"):
        Tokenizer(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json: copy it"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json: .*save_pretrained"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a tokenizer"):
        Tokenizer(tmp_path)
    shutil.copytree(toys.byte_level(tmp_path / "m"), tmp_path / "n")
    (tmp_path / "n" / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="is not valid JSON"):
        Tokenizer(tmp_path / "n")


@pytest.mark.parametrize(
    "text",
    [
        '{"added_tokens_decoder": {"x": {"content": "<|tool|>"}}}',
        '{"added_tokens_decoder": {"400": {"content": "<|tool|>", "lstrip": "no"}}}',
        '{"added_tokens_decoder": {"400": {"content": "<|tool|>", "special": "yes"}}}',
        '{"added_tokens_decoder": {"400": {"content": "\\ud800"}}}',
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
    ids=lambda text: text[:70],
)
def test_damaged_configurations_are_said_in_one_line(tmp_path: Path, text: str) -> None:
    folder = toys.byte_level(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json") as caught:
        Tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_without_a_template_only_chat_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(toys.byte_level(tmp_path / "m", template=None))
    assert tokenizer.encode("fine")
    with pytest.raises(RequestError, match="no chat template; use /v1/completions"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])
