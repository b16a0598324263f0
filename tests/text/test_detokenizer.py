"""Incremental decoding equals decoding the whole; stop strings are found wherever the deltas are cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.text import IncrementalDecoder, StopStrings, Tokenizer
from afterglow.text.detokenizer import REPLACEMENT
from tests import doors

NAMES = ["byte_level", "byte_fallback", "metaspace", "bundled"]
TEXT = st.text(st.sampled_from("ab kite\n.,  üß你好🙂👩\u200d👧 “”\t"), max_size=40) | st.text(max_size=30)


def pieces(tokenizer: Tokenizer, ids: list[int], context: list[int] | None = None, skip: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, context or [], skip_special_tokens=skip)
    found = [decoder.push([token]) for token in ids]
    return [*found, decoder.flush()]


def of(tokenizers: dict[str, Tokenizer], name: str) -> Tokenizer:
    if name not in tokenizers:
        pytest.skip("no bundled model in this checkout")
    return tokenizers[name]


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_deltas_add_up_to_the_decoded_text(tokenizers: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer = of(tokenizers, name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "bundled"])
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_ids_at_all(tokenizers: dict[str, Tokenizer], name: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = of(tokenizers, name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_byte_fallback_differs_only_where_bytes_are_not_text(
    tokenizers: dict[str, Tokenizer], data: st.DataObject
) -> None:
    """The whole-sequence decoder spoils valid characters next to invalid bytes; a stream keeps them."""
    tokenizer = tokenizers["byte_fallback"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    whole = tokenizer.decode(ids)
    got = "".join(pieces(tokenizer, ids))
    assert got == whole or REPLACEMENT in whole
    assert [c for c in whole if c.isascii()] == [c for c in got if c.isascii()] or REPLACEMENT in whole


@pytest.mark.parametrize("name", NAMES)
@given(before=TEXT, after=TEXT)
@settings(max_examples=100, deadline=None)
def test_with_context_a_reply_goes_on_where_the_prompt_ends(
    tokenizers: dict[str, Tokenizer], name: str, before: str, after: str
) -> None:
    tokenizer = of(tokenizers, name)
    context = tokenizer.encode(before + "x", add_special_tokens=False)
    ids = tokenizer.encode(after, add_special_tokens=False)
    whole = tokenizer.decode([*context, *ids])
    assert tokenizer.decode(context) + "".join(pieces(tokenizer, ids, context)) == whole


def test_no_part_of_a_character_is_ever_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("🙈🙉 你們")
    assert len(ids) > 6
    assert REPLACEMENT not in "".join(pieces(byte_level, ids))
    assert all(REPLACEMENT not in piece for piece in pieces(byte_level, ids))


def test_an_unfinished_character_comes_out_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a🙂")[:-1]
    decoder = IncrementalDecoder(byte_level)
    assert decoder.push(ids) == "a"
    assert decoder.holding
    assert decoder.flush() == REPLACEMENT
    assert not decoder.holding
    assert decoder.push(byte_level.encode("b")) == "b"


def test_the_window_stays_short(byte_level: Tokenizer) -> None:
    decoder = IncrementalDecoder(byte_level)
    for token in byte_level.encode("the mill is near the river " * 50):
        decoder.push([token])
        assert len(doors.window_of(decoder)) < 12


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_what_does_not_show_does_not_pile_up(tokenizers: dict[str, Tokenizer], name: str, data: st.DataObject) -> None:
    """Special tokens and lone space markers, by the hundred, before and between visible ones."""
    tokenizer = of(tokenizers, name)
    hidden = [i for i in range(tokenizer.vocab_size) if not tokenizer.decode([i])]
    visible = tokenizer.encode("kite, the mill", add_special_tokens=False)
    runs = data.draw(st.lists(st.tuples(st.sampled_from(hidden), st.integers(0, 150)), min_size=1, max_size=4))
    decoder = IncrementalDecoder(tokenizer)
    ids: list[int] = []
    text = ""
    for token in [t for hide, count in runs for t in [*[hide] * count, *visible]]:
        ids.append(token)
        text += decoder.push([token])
        assert len(doors.window_of(decoder)) <= 65
    assert text + decoder.flush() == tokenizer.decode(ids)


STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        fitting = [stop for stop in stops if text[:end].endswith(stop)]
        if fitting:
            return text[: end if include else end - len(max(fitting, key=len))], True
    return text, False


@given(text=st.text("abc", max_size=30), stops=STOPS, cuts=st.lists(st.integers(0, 30)), include=st.booleans())
@settings(max_examples=400, deadline=None)
def test_stop_strings_do_not_depend_on_the_cuts(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    stopper = StopStrings(stops, include=include)
    got = ""
    for start, stop in itertools.pairwise(edges):
        got += stopper.push(text[start:stop])
        assert reference(text, stops, include)[0].startswith(got)  # text that is out stays out
    got += stopper.flush()
    wanted, stopped = reference(text, stops, include)
    assert got == wanted
    assert (stopper.matched is not None) == stopped


@given(text=st.text("abc", max_size=30), stops=STOPS, first=st.integers(0, 30))
@settings(max_examples=300, deadline=None)
def test_stop_strings_that_end_too_early_are_text(text: str, stops: list[str], first: int) -> None:
    """Characters up to `first` are passed over; a stop string that ends later may begin among them."""
    stopper = StopStrings(stops, include=True)
    got = "".join(stopper.push(char, look=n > first) for n, char in enumerate(text, 1)) + stopper.flush()
    ends = (n for n in range(first + 1, len(text) + 1) if any(text[:n].endswith(stop) for stop in stops if stop))
    assert got == text[: next(ends, len(text))]


class Counted(str):
    """Text whose characters are counted when they are looked at, one by one or in slices."""

    looks = 0

    def __getitem__(self, at: Any) -> str:
        found = super().__getitem__(at)
        Counted.looks += len(found)
        return found


def test_looking_for_stop_strings_takes_time_in_proportion_to_the_text() -> None:
    """Text goes on that is nearly all of several long stop strings, and then is not: the characters of these that are looked at."""

    def looks(length: int) -> int:
        Counted.looks = 0
        stopper = StopStrings([Counted("a" * n + "b") for n in range(length, length + 4)])
        for _ in range(2):
            for _ in range(length // 2):
                stopper.push("aaaa")
            stopper.push("c")
        return Counted.looks

    assert 0 < looks(800) < 2.5 * looks(400)


def test_without_stop_strings_nothing_is_held_back() -> None:
    stopper = StopStrings([])
    assert stopper.push("abc") == "abc"
    assert stopper.flush() == ""
