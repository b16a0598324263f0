"""Multiple choice after an overflow (CachedAttention, table 2): questions, and how a decoder without an engine is asked them.

First a long text overflows the window, then the question comes as new input. LongEval's records of topics do not fit
a small window, so they are shortened: every topic keeps its opening and as much of its talk as its share allows. The
text before the record is what gets dropped; the record survives, its keys and values computed with that text before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.model.decoder import Decoder
from benchmarks.common.paired import Paired
from benchmarks.common.texts import Encode
from benchmarks.papers.cachedattention.overflow import picks
from benchmarks.papers.cachedattention.overflow.context import Context, Session
from benchmarks.papers.cachedattention.overflow.perplexity import PIECES

OPENING = "USER: I would like to discuss the topic of "
RECORD_END = "\n USER: Now the record ends."
TOPIC_QUESTION, TOPIC_CUE = " What is the first topic we discussed? Only give me the topic name.", "\n ASSISTANT:"
CUE = "\nAnswer:"
# Topics of other records among the choices.
FOREIGN = 4
# Without an engine questions are few, and none are left to choose a rule by.
RULE = picks.Rule(less_own=True, per="choice")


@dataclass(frozen=True, slots=True)
class Question:
    """One question; `choices` begin with the space that parts them from it. `cue`: its last words, without what it asks.
    `record`: what it is about, if not about the world: parts of a text; each may lose its end."""

    text: str
    cue: str
    choices: tuple[str, ...]
    answer: int
    record: tuple[str, ...] = ()


@dataclass(slots=True)
class Answers:
    """Right or wrong, and whether the same choice was made as with TT, each 0 or 1."""

    right: Paired
    same: Paired
    chance: float


def read(path: Path) -> list[Question]:
    """Questions of a JSON-lines file: PIQA's goal, sol1, sol2, label; LongEval's prompt, topics; OpenBookQA's question_stem,
    choices, label; COPA's premise, choice1, choice2, question, label; or question, choices and answer (an index; MMLU is easily
    written so)."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "goal" in row:
            text, choices, answer = row["goal"], (row["sol1"], row["sol2"]), row["label"]
        elif "topics" in row:
            found.append(_topics(row["prompt"], row["topics"]))
            continue
        elif "premise" in row:
            found.append(_cause_or_effect(row))
            continue
        elif "question_stem" in row:
            text, choices, answer = row["question_stem"], row["choices"], row["label"]
        else:
            text, choices, answer = row["question"], row["choices"], row["answer"]
        question = f"\nQuestion: {text}{CUE}"
        found.append(Question(question, CUE, tuple(" " + choice.strip() for choice in choices), int(answer)))
    return found


def _cause_or_effect(row: dict[str, Any]) -> Question:
    """COPA as a sentence that goes on, which is how it is asked of language models."""
    word = {"cause": "because", "effect": "so"}[row["question"]]
    choices = tuple(" " + choice[:1].lower() + choice[1:] for choice in (row["choice1"], row["choice2"]))
    return Question(f"\n{row['premise'].strip().rstrip('.')} {word}", f" {word}", choices, int(row["label"]))


def _topics(prompt: str, topics: Sequence[str]) -> Question:
    parts = prompt.split(OPENING)
    record = (parts[0], *(OPENING + part for part in parts[1:]))
    choices = tuple(" " + topic[:1].lower() + topic[1:] for topic in topics)
    return Question(TOPIC_QUESTION + TOPIC_CUE, TOPIC_CUE, choices, 0, record)


def among_others(questions: Sequence[Question]) -> list[Question]:
    """Return LongEval's questions with other choices: beside the right one the first topics of the records that come next in the
    file, if they are not topics of this one. Raises: ValueError where there are too few records."""
    found = []
    for number, question in enumerate(questions):
        right = question.choices[question.answer]
        following = (other.choices[other.answer] for other in (*questions[number + 1 :], *questions[:number]))
        others = [topic for topic in dict.fromkeys(following) if topic not in question.choices][:FOREIGN]
        if len(others) < FOREIGN:
            raise ValueError(f"{len(others)} topics of other records, {FOREIGN} are needed")
        found.append(replace(question, choices=(right, *others), answer=0))
    return found


def answers(
    decoder: Decoder,
    encode: Encode,
    head: Sequence[int],
    text: Sequence[int],
    questions: Sequence[Question],
    *,
    window: int,
    shared: int,
) -> Answers:
    """Ask all questions; `shared` questions (without a record) after one and the same stretch of `text`.

    Questions that would overflow the window once more are left out.
    """
    right, same, chances = Paired(), Paired(), []
    alone = Context(decoder)
    if head:
        alone.extend(head)
    blocks = [[question] for question in questions if question.record]
    rest = [question for question in questions if not question.record]
    blocks += [rest[at : at + shared] for at in range(0, len(rest), shared)]
    at = 0
    for number, block in enumerate(blocks):
        if at + 2 * window > len(text):
            at = 0
        session = _overflowed(Session(decoder, head, window), encode, text[at : at + 2 * window], block[0].record)
        at += window + 17  # another stretch, at another phase of the text
        for question in block:
            asked = encode(question.text)
            branches = [asked + encode(choice) for choice in question.choices]
            if len(session.contexts["TT"]) + max(map(len, branches)) > window:
                continue
            cue, sizes = encode(question.cue), [len(branch) - len(asked) for branch in branches]
            own = _losses(alone, [cue + branch[len(asked) :] for branch in branches], len(cue))
            of = picks.Choices(own, sizes, [len(choice) - 1 for choice in question.choices], question.answer)
            picked = {
                name: RULE.pick(_losses(context, branches, len(asked)), of)
                for name, context in session.contexts.items()
            }
            chances.append(1 / len(question.choices))
            right.add({name: _flag(pick == question.answer) for name, pick in picked.items()}, number)
            same.add({name: _flag(pick == picked["TT"]) for name, pick in picked.items()}, number)
    return Answers(right, same, sum(chances) / max(1, len(chances)))


def _flag(value: bool) -> Tensor:
    return torch.tensor([float(value)])


def _overflowed(session: Session, encode: Encode, text: Sequence[int], record: Sequence[str]) -> Session:
    """Fill the window with text, and with the record where there is one, and let it overflow once."""
    piece = session.window // PIECES
    end = encode(RECORD_END) if record else []
    share = (session.window // 2 - len(end) - piece) // max(1, len(record))
    kept = [token for part in record for token in encode(part)[:share]]
    before = session.window - len(session.head) - len(kept)
    for start in range(0, before, piece):
        session.add(text[start : min(before, start + piece)])
    for start in range(0, len(kept), piece):
        session.add(kept[start : start + piece])
    session.add(end or text[before : before + piece])
    assert session.overflows == 1
    return session


def _losses(context: Context, branches: Sequence[Sequence[int]], asked: int) -> list[float]:
    """Return the loss of each branch: of its tokens after the first `asked`."""
    logits = context.decoder.logits(context.branches(branches))
    found, start = [], 0
    for ids in branches:
        targets = torch.tensor(ids[asked:], device=logits.device)
        own = logits[start + asked - 1 : start + len(ids) - 1]
        found.append(float(F.cross_entropy(own, targets, reduction="sum")))
        start += len(ids)
    return found
