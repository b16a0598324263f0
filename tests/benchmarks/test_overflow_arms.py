"""The arms of tables 1 and 2 through the engine compute what they say: each against a decoder without any engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from benchmarks.papers.cachedattention.overflow.arms import ARMS, Arm, Rig
from benchmarks.papers.cachedattention.overflow.context import Session

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.plan.prefix.truncation import SINK_TOKENS

WINDOW, PIECE, HEAD = 64, 8, (1,)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    cache = CacheConfig(device_cache=2**22, host_cache=2**22, disk_cache=0, source="load")
    config = EngineConfig(cache=cache, max_model_len=WINDOW, truncation_policy="oldest_tokens", speculate="off")
    engine = Engine.load("tiny", config)
    engine.start()
    yield Rig(engine)
    engine.close(flush=False)
    engine.parts.scheduler.check()


def talked(rig: Rig, name: str, ids: list[int], head: tuple[int, ...] = HEAD) -> Arm:
    arm = ARMS[name](rig, head, f"{name} {len(head)} {ids[:4]}")
    arm.begin(ids[: 4 * PIECE])
    for at in range(4 * PIECE, len(ids), PIECE):
        arm.add(ids[at : at + PIECE])
    arm.end()
    return arm


@pytest.mark.parametrize("head", [HEAD, ()])
def test_each_arm_is_what_a_decoder_computes(rig: Rig, head: tuple[int, ...]) -> None:
    ids = tokens(WINDOW + 3 * WINDOW // 2, seed=len(head))
    stays = head or tuple(ids[:SINK_TOKENS])  # what the engine never drops
    session = Session(rig.engine.decoder, stays, WINDOW, variants=("CA", "TT", "NKVT"))
    bare = Session(rig.engine.decoder, head, WINDOW, variants=("none",))
    expected: dict[str, list[float]] = {name: [] for name in ("CA", "TT", "NKVT", "none")}
    with torch.inference_mode():
        for at in range(0, len(ids), PIECE):
            turn = ids[at : at + PIECE]
            found_here = session.add(turn if head or at else turn[SINK_TOKENS:]) | bare.add(turn)
            for name, losses in found_here.items():
                expected[name] += losses.tolist()
    overflows = range(1, session.overflows + 1)
    assert len(overflows) >= 3
    found = {}
    for name in (*expected, "OF"):
        arm = talked(rig, name, ids, head)
        assert arm.overflows == overflows[-1]
        found[name] = [loss for overflow in overflows for loss in arm.losses[overflow]]
    for name, wanted in expected.items():
        assert found[name] == pytest.approx(wanted, abs=1e-4), name
    assert found["OF"] == pytest.approx(found["TT"], abs=1e-4)
    for name in ("CA", "NKVT", "none"):
        assert found[name] != pytest.approx(found["TT"], abs=1e-3), name
    assert found["CA"] != pytest.approx(found["NKVT"], abs=1e-3)


def test_answers_are_branches_of_the_conversation(rig: Rig) -> None:
    """Choices that begin alike, and a question asked twice, find rows in the cache."""
    ids = tokens(2 * WINDOW + PIECE, seed=5)
    session = Session(rig.engine.decoder, HEAD, WINDOW, variants=("CA", "TT", "NKVT", "none"))
    with torch.inference_mode():
        for at in range(0, len(ids), PIECE):
            session.add(ids[at : at + PIECE])
        asked, options = [7, 8, 9], ([10, 11, 12], [10, 11, 40], [50])
        for name, context in session.contexts.items():
            arm = talked(rig, name, ids)
            for question in (asked, asked[:2], asked):
                branches = [[*question, *option] for option in options]
                hidden = torch.split(context.branches(branches), [len(branch) for branch in branches])
                for option, branch, rows in zip(options, branches, hidden, strict=True):
                    logits = rig.engine.decoder.logits(rows[len(question) - 1 : -1])
                    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(option), reduction="sum")
                    assert arm.answer(question, option) == pytest.approx(float(expected), abs=1e-4), (name, branch)
