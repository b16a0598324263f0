"""The arms of tables 1 and 2 through the engine compute what they say: each against a decoder without any engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from benchmarks.papers.cachedattention.overflow.arms import ARMS, Arm, Rig
from benchmarks.papers.cachedattention.overflow.asking import go_on
from benchmarks.papers.cachedattention.overflow.context import Context, Session
from benchmarks.papers.cachedattention.overflow.streams import pieces

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


ASKED, OPTIONS = [7, 8, 9], ([10, 11], [10, 11, 12], [10, 11, 12, 40], [50])
QUESTIONS = [(ASKED, OPTIONS), (ASKED[:2], OPTIONS), (ASKED, OPTIONS)]


def branched(context: Context) -> list[list[float]]:
    """The losses of the choices as a decoder computes them, in branches of a context."""
    found = []
    for question, options in QUESTIONS:
        branches = [[*question, *option] for option in options]
        hidden = torch.split(context.branches(branches), [len(branch) for branch in branches])
        logits = [context.decoder.logits(rows[len(question) - 1 : -1]) for rows in hidden]
        losses = zip(logits, options, strict=True)
        found.append([float(F.cross_entropy(each, torch.tensor(option), reduction="sum")) for each, option in losses])
    return found


def close(found: list[list[float]], expected: list[list[float]]) -> bool:
    return all(a == pytest.approx(b, abs=1e-4) for a, b in zip(found, expected, strict=True))


def test_answers_are_branches_of_the_conversation(rig: Rig) -> None:
    """Choices that begin as others do, or go on from them, and a question asked twice find rows in the cache."""
    ids = tokens(2 * WINDOW + PIECE, seed=5)
    session = Session(rig.engine.decoder, HEAD, WINDOW, variants=("CA", "TT", "NKVT", "none"))
    with torch.inference_mode():
        for at in range(0, len(ids), PIECE):
            session.add(ids[at : at + PIECE])
        for name, context in session.contexts.items():
            arm = talked(rig, name, ids)
            expected = branched(context)
            assert close(arm.answers(QUESTIONS), expected), name
            assert close(arm.answers(QUESTIONS), expected), f"{name}, once more"


def test_a_fork_goes_on_as_if_it_were_alone(rig: Rig) -> None:
    """Two conversations with a common beginning, whose next turns begin alike too; both overflow once more on their own."""
    begun = tokens(WINDOW + 2 * PIECE, seed=6)
    ends = [[*tokens(4, seed=7), *tokens(4 * PIECE, seed=seed)] for seed in (8, 9)]
    for name in ("CA", "TT", "NKVT", "none"):
        shared = ARMS[name](rig, HEAD, f"fork {name}", scored=False)
        shared.begin(begun[: 4 * PIECE])
        go_on(shared, pieces(begun[4 * PIECE :], PIECE), 2)
        assert (shared.overflows, any(shared.losses.values())) == (1, False)
        for end in ends:
            fork = shared.forked()
            go_on(fork, pieces(end, PIECE), 2)
            assert (fork.overflows, any(fork.losses.values())) == (2, False)
            session = Session(rig.engine.decoder, HEAD, WINDOW, variants=(name,))
            with torch.inference_mode():
                for turn in (*pieces(begun, PIECE), *pieces(end, PIECE)):
                    session.add(turn)
                assert session.overflows == 2
                expected = branched(session.contexts[name])
            assert close(fork.answers(QUESTIONS), expected), name
