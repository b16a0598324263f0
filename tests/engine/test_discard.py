"""Tokens that a caller discards from a conversation: the KV of all others is kept, at new positions, for it alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from afterglow.errors import RequestError
from afterglow.model.loader import load_model
from afterglow.plan.prefix.ranges import keep
from afterglow.request import Request, SamplingParams
from tests.engine.by_hand import ask_truncated, logprobs, reference
from tests.engine.conftest import VOCAB, Handle, in_turn
from tests.engine.test_truncation import ROTARY

Start = Callable[..., Handle]
Models = Callable[[str], Path]

SYSTEM = 12
SCATTERED = [(15, 16), (30, 37), (61, 63), (90, 141)]


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def compact(tokens: list[int], dropped: list[tuple[int, int]]) -> list[int]:
    return list(keep(bytes(token for token in tokens for _ in range(4)), dropped)[::4])


def converse(handle: Handle, rng: random.Random, turns: int = 4) -> list[int]:
    """A conversation of 40 tokens a turn and replies of 5."""
    text = words(rng, SYSTEM)
    for _ in range(turns):
        text += words(rng, 40)
        text += [token for output in ask_truncated(handle.engine, text, max_tokens=5) for token in output.tokens]
    return text


@pytest.mark.parametrize("tier", ["at once", "host", "disk", "restart before", "restart after"])
@pytest.mark.parametrize("family", in_turn(ROTARY))
def test_what_remains_is_embedded_at_new_positions(
    start: Start, model_of: Models, tmp_path: Path, family: str, tier: str
) -> None:
    rng = random.Random(family + tier)
    model = model_of(family)
    handle = start(model, tmp_path)

    def restart() -> Handle:
        handle.engine.close()
        return start(model, tmp_path)

    text = converse(handle, rng)
    if tier in ("host", "disk"):
        handle.engine.settle()
        handle.engine.demote("host" if tier == "host" else "disk")
    elif tier == "restart before":
        handle = restart()
    told = handle.engine.discard(text, SCATTERED, system_rows=SYSTEM)
    assert (told.dropped, told.kept, told.reused, told.policy) == (61, len(text) - 61, True, "discard")
    if tier == "restart after":
        handle = restart()
    new = words(rng, 20)
    outputs = ask_truncated(handle.engine, text + new)
    assert outputs[0].truncation == told.__class__(61, told.kept + 20, True, "discard")
    assert outputs[0].cached.total == told.kept
    decoder = load_model(model, dtype="float32", device="cpu", max_model_len=None)
    expected = reference(decoder, text[:-1], SCATTERED, [text[-1], *new])  # the last token was never fed
    assert (logprobs(outputs) - expected).abs().max() < 1e-4
    plain = reference(decoder, compact(text, SCATTERED), [], new)
    assert (logprobs(outputs) - plain).abs().max() > 1e-4, "remaining rows have seen the discarded ones"


def test_no_other_prompt_ever_finds_it(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"))
    text = converse(handle, random.Random(1))
    handle.engine.discard(text, SCATTERED, system_rows=SYSTEM)
    ask_truncated(handle.engine, [*text, 1, 2, 3])
    cut = compact(text, SCATTERED)
    same = handle.ask([*cut, 1, 2, 3], max_tokens=1)  # exactly those tokens, never cut
    assert same.cached.total <= SCATTERED[0][0], "the rows before the first discarded one"
    cold = handle.ask([*cut, 1, 2, 3], max_tokens=1, reuse=False)
    assert dict(same.logprobs[0].top) == pytest.approx(dict(cold.logprobs[0].top), abs=1e-4)
    whole = handle.ask([*text, 1, 2, 3], max_tokens=1)  # and a request that must not be cut has all rows
    assert whole.cached.total == len(text) - 1
    assert whole.truncation is None


def test_indices_do_as_well_as_ranges(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"))
    text = converse(handle, random.Random(2))
    told = handle.engine.discard(text, [20, 21, 22, 80], system_rows=SYSTEM)
    assert told.dropped == 4
    assert told.kept == len(text) - 4


def test_lists_add_up(start: Start, model_of: Models) -> None:
    rng = random.Random(3)
    handle = start(model_of("qwen3"))
    text = converse(handle, rng, turns=3)
    handle.engine.discard(text, [(20, 60)], system_rows=SYSTEM)
    text += words(rng, 30)
    text += [token for output in ask_truncated(handle.engine, text) for token in output.tokens]
    told = handle.engine.discard(text, [(16, 20), (50, 70)], system_rows=SYSTEM)
    assert told.dropped == 54
    assert told.reused
    outputs = ask_truncated(handle.engine, [*text, 5, 6])
    assert outputs[0].cached.total == len(text) - 54


def test_what_remains_can_outgrow_the_window(start: Start, model_of: Models) -> None:
    rng = random.Random(4)
    handle = start(model_of("llama"), max_model_len=256)
    text = converse(handle, rng)
    handle.engine.discard(text, [(20, 30), (100, 110)], system_rows=SYSTEM)
    outputs = ask_truncated(handle.engine, text + words(rng, 90), turns=(SYSTEM,))
    told = outputs[0].truncation
    assert told is not None
    assert told.policy == "oldest"
    assert told.kept == 128
    assert outputs[0].cached.total == 128 - 90, "taken from the remaining rows, not from the old ones"


def test_the_system_prompt_goes_only_if_it_is_meant_to(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"))
    text = converse(handle, random.Random(5))
    with pytest.raises(RequestError, match="first 12 are the system prompt"):
        handle.engine.discard(text, [(8, 20)], system_rows=SYSTEM)
    assert handle.engine.discard(text, [(0, SYSTEM)], system_rows=0).dropped == SYSTEM


@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        ([], "the list is empty"),
        ([(20, 20)], r"\[20, 20\) cannot be discarded"),
        ([(-3, 20)], r"\[-3, 20\) cannot be discarded"),
        ([(20, 1000)], r"\[20, 1000\) cannot be discarded: the context has 57 tokens"),
        ([(0, 30), (30, 57)], "not every token"),
        ([21, 20], "ascending order"),
        ([20, 57], "token 57 cannot be discarded: the context has 57 tokens"),
    ],
)
def test_impossible_lists(start: Start, model_of: Models, dropped: list[tuple[int, int]], message: str) -> None:
    handle = start(model_of("llama"))
    text = converse(handle, random.Random(6), turns=1)
    with pytest.raises(RequestError, match=message):
        handle.engine.discard(text, dropped, system_rows=0)
    assert handle.ask(text).truncation is None
    assert handle.engine.healthy


def test_unknown_conversations(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"))
    text = converse(handle, random.Random(7), turns=1)
    for context, salt in ((text, "another"), ([(token + 1) % VOCAB for token in text], "")):
        with pytest.raises(RequestError, match="nothing of this conversation is cached") as raised:
            handle.engine.discard(context, [(20, 30)], system_rows=0, salt=salt)
        assert raised.value.status == 404


def test_learned_positions_are_refused(start: Start, model_of: Models) -> None:
    handle = start(model_of("opt"))
    text = converse(handle, random.Random(8), turns=1)
    with pytest.raises(RequestError, match="learned positions"):
        handle.engine.discard(text, [(20, 30)], system_rows=0)


def test_a_request_can_bring_its_list(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"))
    text = converse(handle, random.Random(9))
    outputs = ask_truncated(handle.engine, [*text, 7], discard=tuple(SCATTERED))
    assert outputs[0].truncation is not None
    assert outputs[0].truncation.dropped == 61
    assert outputs[0].cached.total == len(text) - 1 - 61
    with pytest.raises(RequestError, match="truncation switched on"):
        handle.engine.submit(Request("x", text, SamplingParams(max_tokens=1), discard=((20, 30),)), lambda output: None)


def test_what_remains_goes_with_the_conversation(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"))
    text = converse(handle, random.Random(10))
    handle.engine.discard(text, SCATTERED, system_rows=SYSTEM, session_id="mine")
    handle.engine.settle()
    before = handle.engine.stats().tiers.host.used
    assert [session.name for session in handle.engine.sessions("")] == ["mine"]
    assert handle.engine.forget_session("", "mine")
    handle.engine.settle()
    assert handle.engine.stats().tiers.host.used < before
    outputs = ask_truncated(handle.engine, [*text, 7])
    assert outputs[0].cached.total == 0, "of the copy nothing is left"
