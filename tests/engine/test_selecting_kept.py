"""Rows that requests compute over a selection, kept for later requests that select (`--importance-exact approximate`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks.papers.spec.attend import Prefix, SelectingAttend, prefill

from afterglow.engine import tee
from afterglow.engine.requests import token_bytes
from afterglow.importance.select import SelectionRules
from afterglow.plan.batching.admission import MIN_ASKING_ROWS
from afterglow.plan.prefix.salts import approximate
from afterglow.request import Output, Request, SamplingParams
from tests.engine.conftest import FAMILIES, OTHER_SCORES, Handle, in_turn
from tests.engine.test_exact_reuse import same
from tests.engine.test_no_memory import scarce
from tests.engine.test_selecting import NEW, ROWS, agree, ask, draw, place

Start = Callable[..., Handle]
Models = Callable[[str], Path]

SHARE, REPLY = 0.3, 40
KEPT = ROWS + NEW + REPLY - 1  # the last token that was drawn has no row


def first_turn(handle: Handle, seed: object, **more: str) -> list[int]:
    """Store a prefix and ask behind it; the prompt and the reply."""
    prompt = [*draw((seed, "prefix"), ROWS), *draw((seed, "asked"), NEW)]
    ask(handle, prompt[:ROWS], None, max_tokens=1, **more)
    handle.engine.settle()
    done = ask(handle, prompt, SHARE, max_tokens=REPLY, **more)
    assert done.selected is not None
    assert (done.selected.rows, done.cached.total) == (ROWS, ROWS)
    handle.engine.settle()
    return [*prompt, *done.tokens]


def kinds(handle: Handle) -> list[str]:
    return handle.engine.ask(lambda: [each.kind for each in handle.engine.parts.scheduler.cache.index.extents.values()])


def expected(handle: Handle, prompt: list[int], new: list[int], steps: int) -> list[torch.Tensor]:
    """Log-probabilities of the second turn's tokens: a selection from the exact rows, and from those that the first turn computed."""
    decoder, rules = handle.engine.decoder, SelectionRules(retention=SHARE)
    with torch.inference_mode():
        exact = prefill(decoder, prompt[:ROWS]).turn(decoder)
        turn = SelectingAttend(decoder, exact, rules, renew=True)
        turn.extend(prompt[ROWS : ROWS + NEW])
        for token in prompt[ROWS + NEW : -1]:
            turn.extend([token])
        both = [
            tuple(torch.cat(each) for each in zip((keys, values), own, strict=True))
            for keys, values, own in zip(exact.keys, exact.values, turn.own, strict=True)
        ]
        rows = Prefix(tuple(keys for keys, _ in both), tuple(values for _, values in both), turned=True)
        again, ids, found = SelectingAttend(decoder, rows, rules, renew=True), [prompt[-1], *new], []
        for _ in range(steps):
            found.append(decoder.logits(again.extend(ids)[-1:])[0].log_softmax(-1))
            ids = [int(found[-1].argmax())]
    return found


@pytest.mark.parametrize("tier", ["host", "disk", "restart"])
@pytest.mark.parametrize("family", in_turn(name for name in FAMILIES if name not in OTHER_SCORES))
def test_the_next_turn_selects_from_them(
    start: Start, model_of: Models, tmp_path: Path, family: str, tier: str
) -> None:
    model = model_of(family)
    handle = start(model, tmp_path, importance=1.0, importance_exact="approximate")
    prompt, new = first_turn(handle, family), draw((family, "next"), NEW)
    assert set(kinds(handle)) == {"exact", "approx"}
    handle = place(handle, tier, start, model, tmp_path, importance_exact="approximate")
    done = ask(handle, [*prompt, *new], SHARE)
    assert done.selected is not None
    assert (done.selected.rows, done.cached.total) == (KEPT, KEPT)
    agree(done, expected(handle, prompt, new, 3))


def test_exact_requests_do_not_find_them(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(model_of("llama"), tmp_path, importance=1.0, importance_exact="approximate")
    prompt = [*first_turn(handle, 1), 1, 2, 3]
    exact = ask(handle, prompt, None)
    assert (exact.selected, exact.cached.total) == (None, ROWS)
    same(exact, ask(handle, prompt, None, reuse=False))
    handle.engine.settle()
    done = ask(handle, [*prompt, *draw("more", NEW)], SHARE)  # what is known exactly by now is better
    assert done.selected is not None
    assert done.selected.rows >= len(prompt)
    assert done.cached.total >= len(prompt)


def test_other_clients_do_not_find_them(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(model_of("llama"), tmp_path, importance=1.0, importance_exact="approximate")
    prompt = first_turn(handle, 1, salt="one")
    ask(handle, prompt[:ROWS], None, max_tokens=1, salt="two")
    handle.engine.settle()
    assert ask(handle, [*prompt, 1], SHARE, salt="two").cached.total == ROWS
    assert ask(handle, [*prompt, 1], SHARE, salt="one").cached.total == len(prompt) + 1 - MIN_ASKING_ROWS


def test_they_go_with_what_they_hang_below_and_with_their_conversation(
    start: Start, model_of: Models, tmp_path: Path
) -> None:
    handle = start(model_of("llama"), tmp_path, importance=1.0, importance_exact="approximate")
    first_turn(handle, 1, salt="one")
    assert "approx" in kinds(handle)
    handle.engine.reset_cache("one")
    handle.engine.settle()
    assert kinds(handle) == []
    first_turn(handle, 2, session_id="talk")
    assert "approx" in kinds(handle)
    assert handle.engine.forget_session("", "talk")
    handle.engine.settle()
    assert kinds(handle) == []


@pytest.mark.parametrize("after", [1, 3, 17])
def test_of_a_cancelled_request_the_rows_that_it_computed_are_kept(
    start: Start, model_of: Models, tmp_path: Path, after: int
) -> None:
    """And no slot of host memory is lost."""
    handle = start(model_of("llama"), tmp_path, importance=1.0, importance_exact="approximate")
    prompt = [*draw("prefix", ROWS), *draw("asked", NEW)]
    handle.ask(prompt[:ROWS], max_tokens=1)
    handle.engine.settle()
    drawn: list[int] = []
    ended = threading.Event()

    def told(output: Output) -> None:
        drawn.extend(output.tokens)
        if len(drawn) == after:
            handle.engine.cancel("cancelled")
        if output.finish_reason is not None:
            ended.set()

    sampling = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
    handle.engine.submit(Request("cancelled", prompt, sampling, kv_retention=SHARE), told)
    assert ended.wait(60)
    handle.engine.settle()
    plan = handle.engine.parts.scheduler
    salt = approximate("")
    rows = handle.engine.ask(lambda: plan.cache.match(salt, token_bytes([*prompt, *drawn])).rows)
    assert ROWS + NEW <= rows <= ROWS + NEW + len(drawn)
    assert rows >= ROWS + NEW + after - 1
    handle.engine.reset_cache()
    handle.engine.settle()
    assert handle.engine.ask(lambda: plan.cache.host.pool.free) == plan.cache.host.pool.total


@pytest.mark.parametrize("layer", [0, 1])
def test_without_memory_for_copies_nothing_is_kept(start: Start, model_of: Models, tmp_path: Path, layer: int) -> None:
    """And no slot of host memory is lost."""
    handle = start(model_of("llama"), tmp_path, importance=1.0, importance_exact="approximate")
    prompt = [*draw("prefix", ROWS), *draw("asked", NEW)]
    handle.ask(prompt[:ROWS], max_tokens=1)
    handle.engine.settle()
    with scarce(tee, "inverse", lambda number: number == layer) as failed:
        done = ask(handle, prompt, SHARE)
        handle.engine.settle()
    assert failed == [layer]
    assert set(kinds(handle)) == {"exact"}
    again = ask(handle, prompt, SHARE)
    assert done.selected is not None
    assert again.selected is not None
    assert again.selected.rows == ROWS
    same(done, again)
    handle.engine.reset_cache()
    handle.engine.settle()
    pool = handle.engine.parts.scheduler.cache.host.pool
    assert handle.engine.ask(lambda: pool.free) == pool.total
