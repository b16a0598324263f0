"""Table 2 through the engine: multiple choice right after the last of several overflows, in all arms.

Questions about the world come behind one and the same stretch of Wikipedia, many to each. LongEval's ask for what the conversation
itself said: the record survives the last overflow. One asks for the first of the record's topics among its topics, as LongEval does.
The other asks among topics of other records: who has read the record can tell.

Arms beside those of `arms.py`: `alone`, the question (and its record) with no conversation before, so that nothing overflows: what the
model can do. `own`: the choices behind the last words of their question alone, for the rule (`picks.py`). OF is left out, since it
computes what TT computes: table 1 shows that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from afterglow.bench.report import show
from benchmarks.papers.cachedattention.overflow import choice_rows, choices, picks, streams, summary
from benchmarks.papers.cachedattention.overflow.arms import ARMS, Arm, Invalidated
from benchmarks.papers.cachedattention.overflow.asking import Asked, go_on
from benchmarks.papers.cachedattention.overflow.choice_rows import ALONE, COMPARED, OWN, VALIDATION
from benchmarks.papers.cachedattention.overflow.parts_file import Form
from benchmarks.papers.cachedattention.overflow.perplexity import PIECES

PARTS, QUICK_PARTS = streams.PARTS, 2
# Of each task, behind one conversation. LongEval has fewer.
QUESTIONS, QUICK_QUESTIONS = 24, 4
# For validation, at most.
VALIDATED, QUICK_VALIDATED = 125, 8
TEXT = "wikitext2/wiki.test.raw"
TOPICS, FOREIGN = "LongEval topics", "LongEval topics, the others from other records"
TASKS = {
    "PIQA": "lm_eval_tasks/piqa.validation.jsonl",
    "OpenBookQA": "lm_eval_tasks/openbookqa.test.jsonl",
    "COPA": "lm_eval_tasks/copa.test500.jsonl",
    TOPICS: "longeval/5_topics.jsonl",
    FOREIGN: "longeval/5_topics.jsonl",
}


def sizes(quick: bool) -> dict[str, int]:
    """Return how many questions of each task are asked behind one conversation, and for validation: parts of other sizes do not go
    together."""
    return {
        "questions": QUICK_QUESTIONS if quick else QUESTIONS,
        "validated": QUICK_VALIDATED if quick else VALIDATED,
    }


def is_short(rows: Sequence[summary.Row]) -> bool:
    """Tell whether some task is missing, or has fewer parts than a full run."""
    return len(rows) < len(TASKS) or any(row["parts"] < PARTS for row in rows)


FORM = Form(choice_rows.rows, choice_rows.goals, is_short)


@dataclass(frozen=True)
class Branch:
    """A way for a conversation to go on, and what is asked there: by task, numbers of questions. `turns`: the conversation;
    `record`: what of it the questions are about, for the arm `alone`."""

    turns: streams.Turns
    record: tuple[int, ...]
    asked: dict[str, list[int]]


@dataclass(frozen=True)
class Tasks:
    """The questions of all tasks that are asked, and how many."""

    asked: Asked
    questions: dict[str, list[choices.Question]]
    sizes: dict[str, int]

    def for_validation(self, task: str) -> list[int]:
        """Return the numbers of the questions that the rule is chosen by, evenly spaced."""
        numbers = [n for n in range(len(self.questions[task])) if picks.is_for_validation(n)]
        return numbers[:: -(-len(numbers) // self.sizes["validated"])]

    def of_part(self, task: str, part: int) -> list[int]:
        """Return the numbers of the questions that are reported, of one part: other ones than those for validation."""
        numbers = [n for n in range(len(self.questions[task])) if not picks.is_for_validation(n)]
        return numbers[part :: streams.PARTS][: self.sizes["questions"]]

    def branches(self, part: int | str, names: Sequence[str]) -> list[Branch]:
        """Return what is asked in a part. Without a conversation for the part `VALIDATION`."""
        by_record: dict[int, dict[str, list[int]]] = {}
        world: dict[str, list[int]] = {}
        for task in names:
            numbers = self.for_validation(task) if isinstance(part, str) else self.of_part(task, part)
            if not self.questions[task][0].record:
                world[task] = numbers
                continue
            for number in numbers:
                by_record.setdefault(number, {})[task] = [number]
        text = [] if isinstance(part, str) else self._text(part)
        window = self.asked.rig.window
        found = [Branch(streams.pieces(text[: -window // 2], window // PIECES), (), world)] if world else []
        for number, tasks in by_record.items():
            question = self.questions[next(iter(tasks))][number]
            head = len(self.asked.bos)
            turns, record = streams.before_a_record(
                text, question, self.asked.encode, head, window, self.asked.overflows
            )
            found.append(Branch(turns, tuple(record), tasks))
        return found

    def _text(self, part: int) -> list[int]:
        asked = self.asked
        turns = streams.of_text(asked.data / TEXT, asked.encode, asked.rig.window, asked.overflows)[part]
        return [token for turn in turns for token in turn]

    def losses(self, arm: Arm, task: str, numbers: Sequence[int], *, cue: bool = False) -> list[list[float]]:
        """Return the loss of each choice of questions, behind the question or its last words alone."""
        encode = self.asked.encode
        asked = [self.questions[task][number] for number in numbers]
        behind = [
            (encode(each.cue if cue else each.text), [encode(choice) for choice in each.choices]) for each in asked
        ]
        return [[round(loss, 3) for loss in losses] for losses in arm.answers(behind)]


def works(asked: Asked, only: Sequence[str], parts: int | None, quick: bool) -> Iterator[Callable[[], None]]:
    """Yield parts: those for validation first, then one of all tasks after the other."""
    questions: dict[str, list[choices.Question]] = {}
    for name in only:
        path = asked.data / TASKS[name]
        if not path.is_file():
            print(f"{name}: not in {asked.data}")
            continue
        found = choices.read(path)
        questions[name] = choices.among_others(found) if name == FOREIGN else found
    tasks = Tasks(asked, questions, sizes(quick))
    for part in (VALIDATION, *range(parts or (QUICK_PARTS if quick else PARTS))):
        for arm in (OWN, ALONE) if part == VALIDATION else (OWN, *COMPARED):
            yield lambda part=part, arm=arm: _measure(tasks, arm, part)  # type: ignore[misc]


def _measure(tasks: Tasks, name: str, part: int | str) -> None:
    """Ask one arm the questions of a part that it has not been asked yet."""
    asked = tasks.asked
    lacking = [task for task in tasks.questions if not asked.file.has(task, name, part)]
    if not lacking:
        return
    began = time.monotonic()
    asked.rig.engine.reset_cache()
    branches = tasks.branches(part, lacking)
    found: dict[str, list[list[float]]] = {task: [] for task in lacking}
    numbers: dict[str, list[int]] = {task: [] for task in lacking}
    for branch, arm in zip(branches, _arms(asked, name, part, branches), strict=True):
        for task, of_task in branch.asked.items():
            found[task] += tasks.losses(arm, task, of_task, cue=name == OWN)
            numbers[task] += of_task
    for task, losses in found.items():
        facts = {"text": task, "arm": name, "part": part, "losses": losses}
        asked.file.add(facts | (_about(tasks, task, numbers[task]) if name == OWN else {}))
    print(f"part {part}, {name}: {time.monotonic() - began:.0f} s", flush=True)


def _about(tasks: Tasks, task: str, numbers: Sequence[int]) -> summary.Part:
    """Tell what questions a part has, and what of their choices no arm changes."""
    asked = [tasks.questions[task][number] for number in numbers]
    return {
        "numbers": list(numbers),
        "answers": [question.answer for question in asked],
        "tokens": [[len(tasks.asked.encode(choice)) for choice in question.choices] for question in asked],
        "characters": [[len(choice) - 1 for choice in question.choices] for question in asked],
    }


def _arms(asked: Asked, name: str, part: int | str, branches: Sequence[Branch]) -> Iterator[Arm]:
    """Yield an arm at the end of each branch. What branches have in common is computed once."""
    rig, head = asked.rig, asked.bos
    if name in (OWN, ALONE):
        for number, branch in enumerate(branches):
            arm: Arm = Invalidated(rig, head, f"{name} {part} {number}")
            arm.begin(branch.record if name == ALONE else ())
            yield arm
        return
    same = _in_common([branch.turns for branch in branches])
    shared = ARMS[name](rig, head, f"{name} {part}", scored=False)
    first, rest = streams.begun(branches[0].turns[:same], len(head), rig.window)
    shared.begin(first)
    go_on(shared, rest, asked.overflows)
    for branch in branches:
        arm = shared.forked()
        go_on(arm, branch.turns[same:], asked.overflows)
        if arm.overflows != asked.overflows:
            raise RuntimeError(f"part {part}, {name}: {arm.overflows} overflows, expected {asked.overflows}")
        yield arm


def _in_common(all_turns: Sequence[streams.Turns]) -> int:
    """Count the turns that all conversations begin with."""
    count = 0
    for turns in zip(*all_turns, strict=False):
        if any(turn != turns[0] for turn in turns):
            break
        count += 1
    return count


def print_rows(rows: Sequence[summary.Row]) -> None:
    """Print the table."""
    show(
        "table 2: accuracy, %",
        ("task", "rule", "questions", "chance", *COMPARED, "CA - TT"),
        [
            (
                row["text"],
                row["rule"],
                row["questions"],
                row["chance"],
                *(summary.pair(row["accuracy"][arm], 1) for arm in COMPARED),
                summary.pair(row["points"]["CA"], 1),
            )
            for row in rows
        ],
    )
