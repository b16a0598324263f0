"""What an engine did, the simulator does: the journal of a small Figure 21, replayed step by step."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from afterglow.request import Output, Request, SamplingParams
from afterglow.sim.simulator import replay_journal
from tests.engine.conftest import VOCAB, Handle

TALKS, TURNS, WORDS, REPLY = 10, 3, 40, 24


def ask(handle: Handle, name: str, prompt: list[int]) -> tuple[list[int], threading.Event]:
    """Submit a turn; its tokens come in from the engine's thread."""
    tokens: list[int] = []
    ended = threading.Event()

    def take(output: Output) -> None:
        tokens.extend(output.tokens)
        if output.finish_reason is not None:
            ended.set()

    sampling = SamplingParams(max_tokens=REPLY, temperature=0, ignore_eos=True)
    handle.engine.submit(Request(name, prompt, sampling), take)
    return tokens, ended


@pytest.mark.parametrize("policy", ["lookahead", "lru", "fifo"])
def test_a_journal_replayed_takes_the_same_steps(
    policy: str, start: Callable[..., Handle], model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    journal = tmp_path / "journal.jsonl"
    model = model_of("llama")
    probe = start(model, tmp_path / "probe")
    block = probe.engine.stats().tiers.host.capacity // probe.engine.capacity.host_slots
    handle = start(
        model,
        tmp_path / "cache",
        policy=policy,
        host_cache=20 * block,  # of conversations of six blocks and more
        disk_cache=2**20,
        device_cache=2**17,
        max_batch=3,
        journal=journal,
    )
    rng = random.Random(5)
    texts = [[rng.randrange(VOCAB) for _ in range(WORDS)] for _ in range(TALKS)]
    for turn in range(TURNS):
        runs = [ask(handle, f"{policy}-{turn}-{i}", text) for i, text in enumerate(texts)]
        for text, (tokens, ended) in zip(texts, runs, strict=True):
            assert ended.wait(60)
            text += [*tokens, *(rng.randrange(VOCAB) for _ in range(WORDS))]
    counters = handle.engine.stats().plan.counters
    handle.engine.close(flush=False)
    assert min(counters.stores, counters.loads, counters.evicted_host) > 0
    one_by_one = replay_journal(journal.read_text().splitlines(), limit=1)
    assert one_by_one.different is None
    repeated = replay_journal(journal.read_text().splitlines())
    assert repeated.different is None
    assert repeated.steps == one_by_one.steps >= TURNS * REPLY
    assert repeated.moves == one_by_one.moves >= counters.loads + counters.stores
