from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.cli.conversation import LEAST, LONGEST_PASSAGE, TIMES, converse, repeated


@given(
    start=st.text("abc ", max_size=60),
    passage=st.text("abcdefgh ,.", min_size=1, max_size=LONGEST_PASSAGE).filter(str.strip),
    times=st.integers(TIMES, TIMES + 3),
)
@settings(derandomize=True)
def test_a_passage_that_is_repeated_is_found_and_left_once(start: str, passage: str, times: int) -> None:
    text = start + passage * max(times, -(-LEAST // len(passage)))
    again = repeated(text)
    assert again > 0
    rest = text[: len(text) - again]
    assert text.startswith(rest)
    assert repeated(rest) < again


@pytest.mark.parametrize(
    "text",
    [
        "",
        "called " * 20,
        "-" * (LEAST - 1),
        "A sentence of its own, which is said three times only. " * 3,
        "".join(f"{number}. The number is {number}.\n" for number in range(200)),
        "| a | b |\n|---|---|\n" + "".join(f"| {n} | {n * n} |\n" for n in range(100)),
    ],
)
def test_other_texts_go_on(text: str) -> None:
    assert repeated(text) == 0


def test_a_reply_that_never_ends_is_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is remembered of it does not repeat itself, so the next reply need not."""
    heard: list[Sequence[dict[str, str]]] = []

    class Endless:
        note = "9 prompt tokens"

        def reply(self, messages: list[dict[str, str]]) -> Iterator[str]:
            heard.append(messages)
            yield "It is "
            while True:
                yield "called "

    lines = iter(["hello", "and then?"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or (_ for _ in ()).throw(EOFError))
    assert converse(Endless(), None) == 0
    said = capsys.readouterr()
    assert said.err.count("[9 prompt tokens, stopped: it repeats itself]") == 2
    assert said.out.count("called") < 2 * 40
    assert heard[1][1] == {"role": "assistant", "content": "It is called"}
