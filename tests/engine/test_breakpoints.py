"""Breakpoints change what is kept, and never an answer: with them and without, over tiers and restarts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest

from afterglow.engine.engine import Completion
from afterglow.engine.requests import token_bytes
from afterglow.request import Breakpoint, Request, SamplingParams
from tests.engine.conftest import VOCAB, Handle
from tests.engine.test_exact_reuse import same

Start = Callable[..., Handle]
Models = Callable[[str], Path]

_ids = count()


def ask(handle: Handle, prompt: Sequence[int], *rows: int, ttl: float = 300.0, max_tokens: int = 4) -> Completion:
    """A greedy reply to a prompt with breakpoints after so many rows."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=VOCAB, ignore_eos=True)
    breakpoints = tuple(Breakpoint(row, ttl) for row in rows)
    (done,) = handle.engine.generate([Request(f"b{next(_ids)}", list(prompt), params, breakpoints=breakpoints)])
    return done


def ends(handle: Handle, tokens: Sequence[int]) -> list[int]:
    """Rows at which the extents of a token string end."""
    match = handle.engine.parts.scheduler.cache.match("", token_bytes(tokens))
    return [view.extent.first_row + view.extent.rows for view in match.views]


@pytest.mark.parametrize("tier", ["device", "host", "disk", "restart"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_reuse_up_to_and_beyond_breakpoints_is_exact(
    start: Start, model_of: Models, tmp_path: Path, family: str, tier: str
) -> None:
    rng = random.Random(family + tier)
    handle = start(model_of(family), tmp_path)
    system = [rng.randrange(VOCAB) for _ in range(75)]
    text = [*system, *(rng.randrange(VOCAB) for _ in range(30))]
    known = 0
    for _ in range(4):
        reply = ask(handle, text, len(system), len(text), max_tokens=7)
        assert reply.cached.total == known
        same(reply, handle.ask(text, reuse=False, max_tokens=7))
        text += [*reply.tokens, *(rng.randrange(VOCAB) for _ in range(20))]
        known = len(text) - 21
        handle.engine.settle()
        if tier == "restart":
            handle.engine.close()
            handle = start(model_of(family), tmp_path)
        elif tier != "device":
            handle.engine.demote(tier)
        assert 75 in ends(handle, text)
        other = [*system, (text[75] + 1) % VOCAB, 3]  # goes on from the first breakpoint
        branch = ask(handle, other, len(system))
        assert branch.cached.total >= 75
        same(branch, handle.ask(other, reuse=False))


def test_answers_and_hits_are_the_same_with_and_without_breakpoints(
    start: Start, model_of: Models, tmp_path: Path
) -> None:
    plain, marked = start(model_of("llama"), tmp_path / "a"), start(model_of("llama"), tmp_path / "b")
    rng = random.Random(5)
    texts: list[list[int]] = [[rng.randrange(VOCAB) for _ in range(70)] for _ in range(3)]
    for turn in range(4):
        for text in texts:
            text += [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
            one, other = ask(plain, text, max_tokens=9), ask(marked, text, 70, len(text), max_tokens=9)
            same(one, other)
            assert one.cached.total == other.cached.total
            text += one.tokens
        for handle in (plain, marked):
            handle.engine.settle()
            handle.engine.demote("disk" if turn % 2 else "host")


def test_marked_rows_are_there_when_unmarked_ones_have_gone_also_after_a_restart(
    start: Start, model_of: Models, tmp_path: Path
) -> None:
    rng = random.Random(9)
    sizes = {"host_cache": 2**19, "disk_cache": 2**19, "device_cache": 2**18}  # about ten prompts of 200 rows
    handle = start(model_of("llama"), tmp_path, **sizes)
    prompts = [[rng.randrange(VOCAB) for _ in range(200)] for _ in range(2)]
    ask(handle, prompts[0], 150, ttl=3600.0)
    ask(handle, prompts[1])

    def flood(count: int) -> None:
        for _ in range(count):
            ask(handle, [rng.randrange(VOCAB) for _ in range(200)], max_tokens=1)

    flood(60)
    handle.engine.settle()
    handle.engine.close()
    handle = start(model_of("llama"), tmp_path, **sizes)
    flood(60)
    kept, gone = ask(handle, prompts[0]), ask(handle, prompts[1])
    assert kept.cached.total >= 150
    assert gone.cached.total < 20, "but for the first tokens that prompts share by chance"
    same(kept, handle.ask(prompts[0], reuse=False))
