"""What SPEC's selection costs SmolLM2-135M: few-shot PIQA, OpenBookQA and COPA, and WikiText-2 behind a long prefix.

Examples in a prefix are not among its questions: OpenBookQA's are of its training set; PIQA and COPA, of which one set is at hand, give a
part of it away. A choice is scored by the mean log-likelihood of its tokens. Nothing is chosen by the figures: alpha is the
paper's, and SPI's rows are those that were important to earlier questions, which are not judged.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from afterglow.library.locate import REAL, find_model
from afterglow.model.decoder import Decoder
from afterglow.model.loader import load_model
from afterglow.text import Tokenizer
from benchmarks.papers.spec import prefixes
from benchmarks.papers.spec.prefixes import Encode, Question, Shared, Solved
from benchmarks.papers.spec.runs import ALPHAS, DEFAULT, EARLIER, EXACT, Protocol, Variant

PREFIX = 1500  # tokens at most
QUERIES = 4  # stretches of text that are judged over each prefix
WAYS = [
    EXACT,
    *(Variant("spec", retention) for retention in (0.5, DEFAULT, 0.1)),
    *(Variant(mode, DEFAULT) for mode in ("h2o", "spi", "random")),
]
OTHER_ALPHAS = [Variant("spec", DEFAULT, alpha) for alpha in ALPHAS if alpha not in (0.0, 0.6)]
TEXT_WAYS: dict[Protocol, list[Variant]] = {"scored": WAYS + OTHER_ALPHAS, "published": WAYS}


@dataclass(frozen=True, slots=True)
class Task:
    """Multiple choice: its file; the file of its examples, or how many questions of the same file are examples instead; how
    many prefixes there are, and questions that are judged over each."""

    file: str
    examples: str | int
    prefixes: int
    each: int

    def read(self, data: Path, seed: int) -> tuple[list[Solved], list[Solved]]:
        """Read questions and examples, both in random order. Raises: OSError."""
        folder = data / "lm_eval_tasks"
        asked = prefixes.read_questions(folder / self.file)
        random.Random(seed).shuffle(asked)
        if isinstance(self.examples, str):
            examples = prefixes.read_questions(folder / self.examples)
        else:
            examples, asked = asked[: self.examples], asked[self.examples :]
        return asked, prefixes.without_asked(examples, asked)

    def shared(self, data: Path, encode: Encode, seed: int, *, quick: bool) -> list[tuple[list[int], list[Question]]]:
        """Draw the prefixes with their questions. Raises: OSError."""
        asked, examples = self.read(data, seed)
        count, each = (2, 2) if quick else (self.prefixes, self.each)
        each += EARLIER
        most = PREFIX // 3 if quick else PREFIX
        return list(prefixes.few_shot(asked, examples, encode, (), most=most, prefixes=count, each=each, seed=seed))


TASKS = {
    "PIQA": Task("piqa.validation.jsonl", 400, 12, 10),
    "OpenBookQA": Task("openbookqa.test.jsonl", "openbookqa.train.jsonl", 14, 12),  # four choices: chance is nearer
    "COPA": Task("copa.test500.jsonl", 200, 14, 11),
}
TEXT, PREFIXES = "WikiText-2", 10


def model() -> tuple[Decoder, Encode]:
    """Load the model and its tokenizer. Raises: AfterglowError."""
    path = find_model(REAL)
    tokenizer = Tokenizer(path)
    return load_model(path), lambda text: tokenizer.encode(text, add_special_tokens=False)


def wikitext(data: Path, encode: Encode, *, quick: bool) -> Iterator[Shared]:
    """Cut prefixes out of WikiText-2, with stretches that follow them. Raises: OSError."""
    ids = encode((data / "wikitext2" / "wiki.test.raw").read_text(encoding="utf-8"))
    rows, count, queries = (PREFIX // 3, 2, 2) if quick else (PREFIX, PREFIXES, QUERIES)
    size = rows + (queries + 3) * 2 * prefixes.TEXT
    return prefixes.stories(prefixes.stretches(ids, count, size), (), rows, queries)
