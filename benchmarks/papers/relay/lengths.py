"""Lengths of prompts and replies that RelayAttention serves (Table 1): its published files' where they are at hand, laws' otherwise."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Lengths = Callable[[random.Random], tuple[int, int]]
FOLDER = "sharegpt_lengths_vllm_ra"
MMLU_REPLY = 32
FEWEST = 4  # tokens of a prompt, and of a reply


def fixed(prompt: int, reply: int) -> Lengths:
    """Make every request as long."""
    return lambda rng: (prompt, reply)


def sharegpt(divide: int) -> Lengths:
    """Questions and replies within 4 to 1,024 tokens, 240 and 235 on average (RelayAttention Table 1), divided."""

    def draw(rng: random.Random) -> tuple[int, int]:
        question, reply = (max(FEWEST, min(1024, int(rng.lognormvariate(5.0, 0.9)))) // divide + 1 for _ in range(2))
        return question, reply

    return draw


def mmlu(rng: random.Random) -> tuple[int, int]:
    """Questions within 55 to 1,219 tokens, about 150 on average, and replies of 32 (Table 1)."""
    return max(55, min(1219, int(rng.lognormvariate(4.75, 0.55)))), MMLU_REPLY


def long_contexts(rng: random.Random) -> tuple[int, int]:
    """Draw questions many times as long as the shared prompt: where reading the system prompt once gains next to nothing."""
    return rng.randint(900, 1500), 24


@dataclass(frozen=True)
class PaperLengths:
    """ShareGPT's and MMLU's lengths, and the tokens of MMLU's five examples. `source`: a file's name, or "laws"."""

    source: str
    sharegpt: Lengths
    mmlu: Lengths
    five_examples: int

    def examples(self, shots: int) -> int:
        """Tokens of so many examples: a fifth of five for each."""
        return round(self.five_examples * shots / 5)

    @classmethod
    def of(cls, data: Path | None, divide: int) -> PaperLengths:
        """Read the files below `data`. Without them lengths come from laws that were fitted to Table 1's means and bounds."""
        folder = data / FOLDER if data is not None else None
        if folder is None or not folder.is_dir():
            return cls("laws", sharegpt(divide), mmlu, 723)
        lines = (folder / "ShareGPT_stat.csv").read_text().split()
        pairs = [(int(prompt), int(reply)) for prompt, reply in (line.split(",") for line in lines)]
        questions: list[int] = json.loads((folder / "mmlu_prompt_stat.json").read_text())
        examples: list[int] = json.loads((folder / "mmlu_5shotprefix_stat.json").read_text())

        def pair(rng: random.Random) -> tuple[int, int]:
            prompt, reply = rng.choice(pairs)
            return max(FEWEST, prompt // divide), max(FEWEST, reply // divide)

        def question(rng: random.Random) -> tuple[int, int]:
            return rng.choice(questions), MMLU_REPLY

        return cls(FOLDER, pair, question, round(statistics.median(examples)))
