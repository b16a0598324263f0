"""Generated conversations against what the papers print of ShareGPT."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from afterglow.errors import ConfigError
from afterglow.sim.workload.sharegpt import PRESETS, ShareGPT, ShareGPTLaw, ThinkLaw, ThinkTime, preset
from afterglow.sim.workload.turns import TraceTurn, Workload, token_bytes

ATC, ARXIV = PRESETS["sharegpt-atc"], PRESETS["sharegpt-arxiv"]
FOLDER = os.environ.get("AFTERGLOW_DATA", "")


def conversations(law: ShareGPTLaw, **options: Any) -> list[list[TraceTurn]]:
    return [list(c.turns) for c in ShareGPT(law, **options)]


@pytest.mark.parametrize(
    ("law", "turns", "multi", "over_2k", "over_4k"),
    [
        (ATC, 5.75, 0.73, 0.47, 0.30),  # CachedAttention 2.3, 2.4, 4.2
        (ARXIV, 3.51, 0.78, 0.84, 0.69),  # AttentionStore 2.3, 2.4, 4.2
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_has_the_statistics_that_the_papers_print(
    law: ShareGPTLaw, turns: float, multi: float, over_2k: float, over_4k: float, seed: int
) -> None:
    found = conversations(law, seed=seed)
    assert len(found) == 9000
    sizes = [c[-1].prompt_tokens + c[-1].output_tokens for c in found]
    assert sum(map(len, found)) / 9000 == pytest.approx(turns, rel=0.025)
    assert sum(len(c) > 1 for c in found) / 9000 == pytest.approx(multi, abs=0.015)
    assert sum(size > 2048 for size in sizes) / 9000 == pytest.approx(over_2k, abs=0.02)
    assert sum(size > 4096 for size in sizes) / 9000 == pytest.approx(over_4k, abs=0.02)
    assert max(map(len, found)) <= 40  # Figure 2 shows no more
    assert max(sizes) <= 32768


@pytest.mark.parametrize(("law", "thousand"), [(ATC, 52), (ARXIV, 32)])
def test_it_has_as_many_turns_as_the_papers_ran(law: ShareGPTLaw, thousand: int) -> None:
    assert sum(map(len, conversations(law))) / 1000 == pytest.approx(thousand, rel=0.03)


def test_late_turns_are_almost_all_history() -> None:
    """Figure 4a: of the tokens of the last turns shown about 99 % are history (98 % in the arXiv version)."""
    for law, share in ((ATC, 0.989), (ARXIV, 0.98)):
        late = [turn for c in conversations(law) for turn in c if turn.index >= 34]
        assert len(late) > 10
        assert 1 - sum(t.new_tokens for t in late) / sum(t.prompt_tokens for t in late) > share


def test_sessions_arrive_as_a_poisson_process() -> None:
    starts = [c.start for c in ShareGPT(ATC, rate=2.0)]
    gaps = [b - a for a, b in zip([0.0, *starts], starts, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.5, rel=0.03)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)  # 1/e


@pytest.mark.parametrize(("law", "median"), [("exponential", 0.693), ("constant", 1.0), ("lognormal", 0.607)])
def test_think_times(law: ThinkLaw, median: float) -> None:
    rng = Random(0)
    drawn = sorted(ThinkTime(30.0, law).draw(rng) for _ in range(20_000))
    assert sum(drawn) / len(drawn) == pytest.approx(30.0, rel=0.04)
    assert drawn[10_000] / 30.0 == pytest.approx(median, rel=0.04)
    assert ThinkTime(0.0, law).draw(rng) == 0.0
    found = conversations(ATC, conversations=2000, think=ThinkTime(30.0, law))
    thought = [t.think for c in found for t in c[1:]]
    assert sum(thought) / len(thought) == pytest.approx(30.0, rel=0.05)
    assert all(c[0].think == 0.0 for c in found)


def test_equal_seeds_give_equal_workloads() -> None:
    assert conversations(ATC, conversations=50, seed=5) == conversations(ATC, conversations=50, seed=5)
    assert conversations(ATC, conversations=50, seed=5) != conversations(ATC, conversations=50, seed=6)
    # A conversation does not depend on how many there are, nor on how often they begin.
    few, many = ShareGPT(ATC, conversations=10, rate=1.0), ShareGPT(ATC, conversations=20, rate=3.0)
    for one, other in zip(few, many, strict=False):
        assert [t.prompt for t in one.turns] == [t.prompt for t in other.turns]


def test_each_turn_goes_on_where_the_reply_before_it_ended() -> None:
    for c in conversations(ATC, conversations=40, system_tokens=100):
        for index, turn in enumerate(c):
            assert turn.index == index
            assert turn.turns[0] == 100
            assert turn.prompt_tokens > turn.turns[-1]
            assert len(turn.turns) == index + 1
        for before, after in zip(c, c[1:], strict=False):
            context = token_bytes(before.prompt) + token_bytes(before.reply)
            assert token_bytes(after.prompt).startswith(context)
            assert after.new_tokens == after.prompt_tokens - len(context) // 4
            assert after.turns[-1] == len(context) // 4


def test_only_the_system_prompt_is_shared() -> None:
    found = [token_bytes(c[0].prompt) for c in conversations(ATC, conversations=30, system_tokens=100)]
    assert len({prompt[:400] for prompt in found}) == 1
    assert len({prompt[400:404] for prompt in found}) == 30
    without = [token_bytes(c[0].prompt) for c in conversations(ATC, conversations=30)]
    assert len({prompt[:4] for prompt in without}) == 30


def test_single_turns_can_be_cut_to_a_window() -> None:
    found = conversations(ARXIV, conversations=300, max_prompt=512, max_reply=256)
    assert max(t.new_tokens for c in found for t in c) == 512
    assert max(t.output_tokens for c in found for t in c) == 256
    assert sum(map(len, found)) == sum(map(len, conversations(ARXIV, conversations=300)))


def test_every_turn_arrives_once() -> None:
    """Through a workload whose turns take no time: each conversation's turns in order, nothing left behind."""
    source = ShareGPT(ATC, conversations=500)
    workload = Workload(source)
    seen: dict[str, int] = {}
    last = 0.0
    while (time := workload.peek()) is not None:
        for arrival in workload.take(time):
            assert last <= arrival.time == time
            last = time
            assert seen.get(arrival.turn.session, -1) == arrival.turn.index - 1
            seen[arrival.turn.session] = arrival.turn.index
            workload.finished(arrival.turn.session, time)
    assert source.fraction == 1.0
    assert len(seen) == 500
    assert workload.taken == sum(map(len, conversations(ATC, conversations=500)))


def test_impossible_wishes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown workload 'sharegpt-act': did you mean sharegpt-atc"):
        preset("sharegpt-act")
    wishes: Sequence[dict[str, Any]] = (
        {"rate": 0.0},
        {"rate": float("nan")},
        {"conversations": 0},
        {"system_tokens": -1},
        {"max_prompt": 0},
        {"max_reply": -1},
    )
    for wish in wishes:
        with pytest.raises(ConfigError, match="must be"):
            ShareGPT(ATC, **wish)
    with pytest.raises(ConfigError, match="0 or more seconds"):
        ThinkTime(-1.0)
    with pytest.raises(ConfigError, match="think times are exponential, constant, lognormal, not 'uniform'"):
        ThinkTime(1.0, "uniform")  # type: ignore[arg-type]


def test_first_turns_are_as_long_as_measured() -> None:
    """Published lengths of ShareGPT's first turns, which are cut at 1,024 tokens as ours: the spread of the logarithms and
    the means are of one size. (The papers' shares of long conversations ask for longer replies than those.)"""
    path = Path(FOLDER) / "sharegpt_lengths_vllm_ra/ShareGPT_stat.csv"
    if not (FOLDER and path.is_file()):
        pytest.skip("no sharegpt_lengths_vllm_ra in AFTERGLOW_DATA")
    with path.open() as file:
        measured = [(int(q), int(a)) for q, a in csv.reader(file)]
    drawn = [ATC.lengths(Random(n))[0] for n in range(20_000)]
    for position, (low, high) in enumerate(((0.8, 1.3), (1.3, 2.2))):
        ours = sum(pair[position] for pair in drawn) / len(drawn)
        theirs = sum(pair[position] for pair in measured) / len(measured)
        assert low < ours / theirs < high
