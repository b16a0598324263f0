"""Prefixes that many requests share, and the requests: dialogues with facts, stories, few-shot examples."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tokenizers
from scripts.small_model.dialogues import Dialogue, Fact, Writer
from scripts.small_model.facts import READ_REQUESTS, SYSTEM_PROMPTS
from scripts.small_model.tokenizer import BOS, END, SYSTEM, USER

from benchmarks.common.model_texts import SEED

Encode = Callable[[str], list[int]]
TEXT = 32  # tokens that come with the request, and as many that are predicted


@dataclass(frozen=True, slots=True)
class Query:
    """A request over a prefix: its new tokens, and what should follow. `value`: index in `reply` of the token that says
    whether a fact was recalled; None where there is none."""

    prompt: list[int]
    reply: list[int]
    value: int | None = None


@dataclass(frozen=True, slots=True)
class Shared:
    """A prefix and requests over it. The first `earlier` requests are not judged: they tell which rows have been important."""

    prefix: list[int]
    queries: list[Query]
    earlier: int


@dataclass(frozen=True, slots=True)
class Question:
    """Multiple choice."""

    prompt: list[int]
    choices: list[list[int]]
    answer: int


class Solved(NamedTuple):
    """A multiple-choice question as text, and the index of the right choice."""

    text: str
    choices: list[str]
    answer: int


def dialogues(
    directory: Path, sentences: Sequence[str], *, count: int, tokens: int, facts: int, seed: int
) -> Iterator[Shared]:
    """Draw dialogues of the training's kind with held-out text: facts are told in between, and not yet asked for.

    Over each: a question for every fact, and two texts to go on with. Five of these requests are the earlier ones.
    """
    fast = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    writer = Writer(fast, sentences, SEED + 7 + seed)
    for _ in range(count):
        d, told = _dialogue(writer, tokens, facts)
        asked = [_question(writer, fact) for fact in told]
        texts = [_text(writer) for _ in range(3)]
        yield Shared(d.ids, [*asked[:4], texts[0], *asked[4:], *texts[1:]], 5)


def _dialogue(writer: Writer, tokens: int, facts: int) -> tuple[Dialogue, list[Fact]]:
    rng, d = writer.rng, Dialogue()
    writer.put(d, [BOS], 0.0)
    if rng.random() < 0.5:
        writer.put(d, [SYSTEM], 0.0)
        writer.put_text(d, rng.choice(SYSTEM_PROMPTS), 0.0)
        writer.put(d, [END], 0.0)
    writer.chat(d, 0.0, 0)  # so that no fact is part of the system prompt
    told = writer.draw_facts(facts, 0.35, rng.random() < writer.p_bind)
    groups, left = [], list(told)
    while left:
        groups.append([left.pop() for _ in range(min(len(left), rng.randint(1, 3)))])
    for number, group in enumerate(groups, 1):
        writer.tell(d, group, {}, rng.choice((0.0, 0.0, 0.15)))
        while len(d.ids) < tokens * number / len(groups):
            writer.chat(d, rng.choice((0.0, 0.6)), 160)
    rng.shuffle(told)
    return d, told


def _question(writer: Writer, fact: Fact) -> Query:
    d = Dialogue()
    writer.ask(d, fact, {}, True)
    start = d.answers[0].start
    return Query(d.ids[:start], d.ids[start:], d.answers[0].value - start)


def _text(writer: Writer) -> Query:
    d = Dialogue()
    writer.put(d, [USER], 0.0)
    writer.put_text(d, writer.rng.choice(READ_REQUESTS), 0.0)
    while len(d.ids) < 2 * TEXT:
        writer.put_text(d, " " + writer.rng.choice(writer.sentences), 0.0)
    return Query(d.ids[:TEXT], d.ids[TEXT : 2 * TEXT])


def stories(streams: Sequence[Sequence[int]], head: Sequence[int], prefix: int, queries: int) -> Iterator[Shared]:
    """One story after the other as a prefix; requests go on with the rest of the text and, as if that were many
    requests, with other stretches of text. `streams` have prefix + (queries + 3) * 64 tokens."""
    size = 2 * TEXT
    for ids in streams:
        body = ids[: prefix - len(head)]
        parts = [ids[at : at + size] for at in range(len(body), len(ids) - size + 1, size)][: queries + 3]
        asked = [Query(list(part[:TEXT]), list(part[TEXT:])) for part in parts]
        yield Shared([*head, *body], asked[1:4] + asked[:1] + asked[4:], 3)  # the one that fits the text is judged


def stretches(ids: Sequence[int], count: int, size: int) -> list[Sequence[int]]:
    """Cut `count` stretches of `size` tokens out of a text, at equal distances. Raises: ValueError if it is too short."""
    apart = len(ids) // count
    if apart < size:
        raise ValueError(f"{count} stretches of {size} tokens are not in a text of {len(ids)}")
    return [ids[at * apart : at * apart + size] for at in range(count)]


def read_questions(path: Path) -> list[Solved]:
    """Read PIQA, OpenBookQA or COPA."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "goal" in row:
            text, choices = f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]]
        elif "premise" in row:
            because = "because" if row["question"] == "cause" else "so"
            text, choices = f"{row['premise'].rstrip('.')} {because}", [row["choice1"], row["choice2"]]
            choices = [choice[:1].lower() + choice[1:] for choice in choices]  # within the sentence
        else:
            text, choices = row["question_stem"], row["choices"]
        found.append(Solved(text, [" " + choice.strip() for choice in choices], int(row["label"])))
    return found


def without_asked(examples: Sequence[Solved], asked: Sequence[Solved]) -> list[Solved]:
    """Drop examples whose question is asked: PIQA has questions that come again with other choices."""
    texts = {question.text for question in asked}
    return [example for example in examples if example.text not in texts]


def few_shot(
    asked: Sequence[Solved],
    examples: Sequence[Solved],
    encode: Encode,
    head: Sequence[int],
    *,
    most: int,
    prefixes: int,
    each: int,
    seed: int,
) -> Iterator[tuple[list[int], list[Question]]]:
    """Yield prefixes of solved examples, and the next `each` questions over each: none is asked twice.

    Examples are drawn anew for each prefix, until the next one would make more than `most` tokens.
    """
    source, rng = iter(asked), random.Random(seed)
    for _ in range(prefixes):
        ids = list(head)
        for text, choices, answer in rng.sample(examples, len(examples)):
            example = encode(f"{text}{choices[answer]}\n\n")
            if len(ids) + len(example) > most:
                break
            ids += example
        over = [
            Question(encode(text), [encode(choice) for choice in choices], answer)
            for text, choices, answer in itertools.islice(source, each)
        ]
        yield ids, over
