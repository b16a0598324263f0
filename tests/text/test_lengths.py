"""Long texts: too long for certain, and tokenised beside other threads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.errors import RequestError
from afterglow.request import ContextWindow
from afterglow.text import Tokenizer
from tests import doors
from tests.text import toys
from tests.text.test_detokenizer import NAMES, TEXT, of


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXT | st.lists(st.sampled_from(["    ", "the mill", "<|im_end|>", "\u1f82", "\n"])).map("".join))
@settings(max_examples=150, deadline=None)
def test_never_more_than_there_are(tokenizers: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer = of(tokenizers, name)
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


def test_the_longest_token_decides(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    longest = max(len(tokenizer.token_bytes(token).decode("utf-8", "ignore")) for token in range(400))
    assert tokenizer.least_tokens("x" * 1000) == -(-1000 // longest)
    assert tokenizers["byte_fallback"].least_tokens("x" * 1000) > 50
    assert tokenizers["metaspace"].least_tokens("x" * 1000) == 0  # any number of unknown characters may be one token


NORMALIZERS: list[tuple[dict[str, Any] | None, int]] = [
    (None, 1),
    ({"type": "NFC"}, 4),
    ({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}, 4),
    ({"type": "Replace", "pattern": {"String": "ab"}, "content": "a"}, 0),
    ({"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}, 0),
    ({"type": "Strip", "strip_left": True, "strip_right": True}, 0),
    ({"type": "StripAccents"}, 0),
]


def edited(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Tokenizer:
    file = toys.byte_level(folder) / "tokenizer.json"
    state = json.loads(file.read_text())
    edit(state)
    file.write_text(json.dumps(state))
    return Tokenizer(folder)


@pytest.mark.parametrize(("normalizer", "shrinks"), NORMALIZERS)
def test_normalizers_may_drop_characters(tmp_path: Path, normalizer: dict[str, Any] | None, shrinks: int) -> None:
    plain = Tokenizer(toys.byte_level(tmp_path / "plain")).least_tokens("x" * 5200)
    tokenizer = edited(tmp_path / "m", lambda state: state.update(normalizer=normalizer))
    assert tokenizer.least_tokens("x" * 5200) == (plain // shrinks if shrinks else 0)


def test_so_may_other_steps(tmp_path: Path) -> None:
    def removes(state: dict[str, Any]) -> None:
        split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, state["pre_tokenizer"]]}

    def swallows(state: dict[str, Any]) -> None:
        state["added_tokens"][0]["lstrip"] = True

    def lacks(state: dict[str, Any]) -> None:
        del state["model"]["vocab"]["!"]

    for number, edit in enumerate((removes, swallows, lacks)):
        assert edited(tmp_path / str(number), edit).least_tokens("x" * 1000) == 0


def test_a_conversation_that_cannot_fit_is_refused_before(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "x" * 100_000}]
    with pytest.raises(RequestError, match=r"512 tokens, but the prompt has 1000.. characters") as caught:
        byte_level.encode_chat(messages, window=ContextWindow(512))
    assert caught.value.code == "context_length_exceeded"
    assert len(byte_level.encode_chat(messages).ids) > 512


def test_long_texts_are_the_same_to_the_tokenizer(tokenizers: dict[str, Tokenizer]) -> None:
    text = "the mill is near the river, Grüße! " * 1000
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode(text)
        assert ids == doors.library_tokenizer(tokenizer).encode(text).ids
        assert tokenizer.decode(ids) == doors.library_tokenizer(tokenizer).decode(ids)


def test_other_threads_run_meanwhile(byte_level: Tokenizer) -> None:
    text = "the mill is near the river. " * 30_000
    worker = threading.Thread(target=lambda: byte_level.encode(text))
    worker.start()
    turns = 0
    while worker.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns >= 5  # it would hold the interpreter from beginning to end
