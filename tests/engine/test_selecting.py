"""Requests that attend to a part of their cached prefix: against the same selection over rows that are all in memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from afterglow.engine.engine import Completion
from afterglow.errors import RequestError
from afterglow.importance.attend import SelectingAttend, prefill
from afterglow.importance.identify import Rules
from afterglow.plan.admission import LEAST_ASKING
from afterglow.request import Request, SamplingParams
from tests.engine.by_hand import ask_truncated, logprobs, reference
from tests.engine.conftest import FAMILIES, VOCAB, Handle
from tests.engine.test_exact_reuse import same
from tests.engine.test_truncation import SYSTEM, TURN, WINDOW, turns_of

Start = Callable[..., Handle]
Models = Callable[[str], Path]

ROWS, NEW = 230, 20
_ids = count()


def ask(handle: Handle, prompt: list[int], retention: float | None, max_tokens: int = 3, **more: Any) -> Completion:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=VOCAB, ignore_eos=True)
    (done,) = handle.engine.generate([Request(f"s{next(_ids)}", prompt, sampling, kv_retention=retention, **more)])
    return done


def draw(seed: object, n: int) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(VOCAB) for _ in range(n)]


def expected(handle: Handle, prefix: list[int], new: list[int], retention: float, steps: int) -> list[torch.Tensor]:
    """Log-probabilities of the tokens to come, drawing greedily, from rows that are all in memory."""
    decoder = handle.engine.decoder
    with torch.inference_mode():
        attend = SelectingAttend(decoder, prefill(decoder, prefix), Rules(retention=retention))
        ids, found = new, []
        for _ in range(steps):
            found.append(decoder.logits(attend.extend(ids)[-1:])[0].log_softmax(-1))
            ids = [int(found[-1].argmax())]
    return found


def agree(done: Completion, wanted: list[torch.Tensor]) -> None:
    for logprob, log_softmax in zip(done.logprobs, wanted, strict=True):
        for token, value in logprob.top:
            assert value == pytest.approx(float(log_softmax[token]), abs=1e-4)


def place(handle: Handle, tier: str, start: Start, model: Path, folder: Path, **more: Any) -> Handle:
    handle.engine.settle()
    if tier == "restart":
        handle.engine.close()
        return start(model, folder, importance=1.0, **more)
    handle.engine.demote(tier)
    return handle


@pytest.mark.parametrize("tier", ["host", "disk", "restart"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_selection_is_what_it_is_in_memory(
    start: Start, model_of: Models, tmp_path: Path, family: str, tier: str
) -> None:
    model = model_of(family)
    handle = start(model, tmp_path, importance=1.0, importance_exact="never")
    prefix, new = draw(family, ROWS), draw(tier, NEW)
    handle.ask(prefix, max_tokens=1)
    handle = place(handle, tier, start, model, tmp_path, importance_exact="never")
    for retention in (0.1, 0.5, 0.9):
        done = ask(handle, [*prefix, *new], retention)
        assert done.selected is not None
        assert done.selected.rows == ROWS
        assert retention * ROWS - 1 <= done.selected.kept <= retention * ROWS + 1
        agree(done, expected(handle, prefix, new, retention, 3))
    everything = ask(handle, [*prefix, *new], 0.9999)
    assert everything.selected is not None
    assert everything.selected.kept == ROWS
    same(everything, handle.ask([*prefix, *new], reuse=False, max_tokens=3))


def test_nothing_approximate_is_kept(start: Start, model_of: Models, tmp_path: Path) -> None:
    """X3: what follows a request with a selection reads nothing of what that one has computed."""
    handle = start(model_of("llama"), tmp_path, importance=1.0, importance_exact="never")
    prefix, new = draw(1, ROWS), draw(2, NEW)
    handle.ask(prefix, max_tokens=1)
    done = ask(handle, [*prefix, *new], 0.05, max_tokens=30)
    handle.engine.settle()
    prompt = [*prefix, *new, *done.tokens, 1, 2, 3]
    exact = handle.ask(prompt, max_tokens=6)
    assert exact.cached.total <= ROWS
    same(exact, handle.ask(prompt, reuse=False, max_tokens=6))


def test_when_idle_the_prompt_is_computed_exactly(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(model_of("llama"), tmp_path, importance=0.2)
    prefix, new = draw(1, ROWS), draw(2, NEW)
    handle.ask(prefix, max_tokens=1)
    handle.engine.settle()
    done = ask(handle, [*prefix, *new], None)
    assert done.selected is not None
    handle.engine.settle()
    prompt = [*prefix, *new, 1, 2, 3]
    exact = ask(handle, prompt, 1.0)
    assert exact.selected is None
    assert exact.cached.total == ROWS + NEW
    same(exact, handle.ask(prompt, reuse=False, max_tokens=3))


def test_rows_in_another_order_change_no_answer(start: Start, model_of: Models, tmp_path: Path) -> None:
    model = model_of("qwen2")
    handle = start(model, tmp_path, importance=1.0, importance_exact="never", importance_share=0.0)
    prefix = draw(1, ROWS)
    handle.ask(prefix, max_tokens=1)
    handle.engine.settle()
    handle.engine.demote("disk")
    prompts = [[*prefix, *draw(i, NEW)] for i in range(4)]
    before = [ask(handle, prompt, 0.2) for prompt in prompts]
    loader = handle.engine._parts.important.loader  # type: ignore[union-attr]
    begun: list[int] = []
    handle.engine._on_thread(lambda: begun.append(loader.reorder()))
    handle.engine.settle()
    assert begun == [1]
    for prompt, first in zip(prompts, before, strict=True):
        again = ask(handle, prompt, 0.2)
        assert again.selected == first.selected
        same(again, first)
    assert loader.stats.tally.wasted + loader.stats.tally.used == loader.stats.tally.prefetched
    exact = handle.ask(prompts[0], max_tokens=3)
    assert exact.cached.disk == ROWS
    same(exact, handle.ask(prompts[0], reuse=False, max_tokens=3))


def test_damage_costs_time_and_nothing_else(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(model_of("llama"), tmp_path, importance=1.0, importance_exact="never", importance_share=0.0)
    prefix, new = draw(1, ROWS), draw(2, NEW)
    handle.ask(prefix, max_tokens=1)
    handle.engine.settle()
    handle.engine.demote("disk")
    (path,) = [p for p in tmp_path.glob("*/extents/*/*.safetensors") if p.stat().st_size > 60_000]
    data = bytearray(path.read_bytes())
    for at in range(20_000, len(data), 1000):
        data[at] ^= 1
    path.write_bytes(data)
    done = ask(handle, [*prefix, *new], 0.5)
    same(done, handle.ask([*prefix, *new], reuse=False, max_tokens=3))
    assert handle.engine.stats().store.damage >= 1


@pytest.mark.parametrize("relay", ["on", "off"])
@pytest.mark.parametrize("chunk", [0, 64])
def test_beside_others(start: Start, model_of: Models, tmp_path: Path, relay: str, chunk: int) -> None:
    """Exact and selecting requests in one batch, with what the former share read once or not, in pieces or not."""
    model = model_of("mistral")
    handle = start(model, tmp_path, importance=1.0, importance_exact="never", prefill_chunk=chunk, relay=relay)
    prefix = draw(1, ROWS)
    handle.ask(prefix, max_tokens=1)
    handle.engine.settle()
    handle.engine.demote("disk")
    sampling = SamplingParams(max_tokens=5, temperature=0, logprobs=VOCAB, ignore_eos=True)
    prompts = [[*prefix, *draw(i, 90)] for i in range(6)]
    shares = [None, 0.3, 0.1, None, 0.6, 0.3]
    requests = [
        Request(f"b{i}", prompt, sampling, kv_retention=share)
        for i, (prompt, share) in enumerate(zip(prompts, shares, strict=True))
    ]
    for done, prompt, share in zip(handle.engine.generate(requests), prompts, shares, strict=True):
        if share is None:
            same(done, handle.ask(prompt, reuse=False, max_tokens=5))
        else:
            agree(done, expected(handle, prefix, prompt[ROWS:], share, 5))


def test_shares_that_make_no_sense(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(model_of("llama"), tmp_path, importance=0.5)
    for wrong in (0.0, -1.0, 1.5):
        with pytest.raises(RequestError, match="kv_retention is the share"):
            ask(handle, draw(1, 80), wrong)


def test_a_prompt_that_is_known_asks_with_its_last_tokens(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(model_of("llama"), tmp_path, importance=1.0, importance_exact="never")
    prompt = draw(1, ROWS)
    handle.ask(prompt, max_tokens=1)
    handle.engine.settle()
    done = ask(handle, prompt, 0.3)
    assert done.selected is not None
    assert done.selected.rows == ROWS - LEAST_ASKING
    agree(done, expected(handle, prompt[:-LEAST_ASKING], prompt[-LEAST_ASKING:], 0.3, 3))


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_of_a_truncated_conversation_all_is_what_it_is_without(
    start: Start, model_of: Models, tmp_path: Path, family: str
) -> None:
    """Positions are those in the truncated context (X10), and its private rows can be selected from."""
    model = model_of(family)
    handle = start(model, tmp_path, max_model_len=WINDOW, importance=1.0, importance_exact="never")
    text = draw(family, SYSTEM + 5 * TURN)
    for rows in range(SYSTEM + TURN, len(text) + 1, TURN):
        ask_truncated(handle.engine, text[:rows], turns=turns_of(rows))
    handle.engine.settle()
    handle.engine.demote("disk")
    new = draw("new", TURN)
    turns = turns_of(len(text) + TURN)
    outputs = ask_truncated(handle.engine, text + new, turns=turns, kv_retention=0.9999)
    told, selected = outputs[0].truncation, outputs[0].selected
    assert told is not None
    assert told.reused
    assert selected is not None
    assert selected.kept == selected.rows == told.kept - TURN
    decoder = handle.engine.decoder
    wanted = reference(decoder, text, [(SYSTEM, SYSTEM + told.dropped)], new)
    assert (logprobs(outputs) - wanted).abs().max() < 1e-4
    part = ask_truncated(handle.engine, [*text, *new[:-1], 0], turns=turns, kv_retention=0.3)
    assert part[0].selected is not None
    assert part[0].selected.kept < 0.4 * part[0].selected.rows


@pytest.mark.parametrize("retention", [0.2, 0.6])
def test_a_registered_prompt_is_attended_to_as_a_whole(
    start: Start, model_of: Models, tmp_path: Path, retention: float
) -> None:
    """X8: it is not among what is selected from, and takes its share of the attention."""
    handle = start(model_of("llama"), tmp_path, importance=1.0, importance_exact="never")
    prompt, rest, new = draw("system", 90), draw(1, 140), draw(2, NEW)
    handle.engine.register_prefix("system", prompt, salt=None)
    prefix = [*prompt, *rest]
    ask(handle, prefix, 1.0, salt="somebody")
    handle.engine.settle()
    handle.engine.demote("disk")
    done = ask(handle, [*prefix, *new], retention, salt="somebody")
    assert done.selected is not None
    assert done.selected.kept == 90 + round(retention * 140)
    decoder = handle.engine.decoder
    with torch.inference_mode():
        attend = SelectingAttend(decoder, prefill(decoder, prefix), Rules(retention=retention), system=90)
        wanted = decoder.logits(attend.extend(new)[-1:])[0].log_softmax(-1)
    agree(replace(done, logprobs=done.logprobs[:1]), [wanted])
