"""Same weights must mean same tokens; otherwise no timing means anything."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.peers.processes import PeerError

LENGTHS = (48, 300, 1024)
NEW = 4


def prompts(seed: int, vocab: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Seeded prompts to compare engines on; the end-of-text ids 0 to 2 are left out."""
    rng = random.Random(f"{seed} agree")
    return [fresh(rng, vocab, length) for length in lengths]


def fresh(rng: random.Random, vocab: int, length: int) -> list[int]:
    return [rng.randrange(3, vocab) for _ in range(length)]


def check(answers: dict[str, list[list[int]]]) -> dict[str, int]:
    """First tokens of all engines must be those of the first engine.

    Returns how many tokens in a row each has in common with it, summed over prompts. Raises: PeerError that names who differs.
    """
    (reference, wanted), *_ = answers.items()
    common = {}
    for name, given in answers.items():
        firsts, theirs = [tokens[0] for tokens in wanted], [tokens[0] for tokens in given]
        if firsts != theirs:
            raise PeerError(
                f"{name} and {reference} begin differently on the same prompts: {theirs} and {firsts}; they do not run the same "
                "weights, and nothing can be compared"
            )
        common[name] = sum(_alike(a, b) for a, b in zip(wanted, given, strict=True))
    return common


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    for number, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return number
    return min(len(a), len(b))
