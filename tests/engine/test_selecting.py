"""Requests that attend to a part of their cached prefix: against the same selection over rows that are all in memory."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.papers.spec import prefixes
from benchmarks.papers.spec.attend import SelectingAttend, prefill
from benchmarks.papers.spec.means import left_out, means_of

from afterglow.config import EngineConfig
from afterglow.engine.engine import Completion
from afterglow.engine.selective import PrefixSelection, SelectiveAttention
from afterglow.errors import ConfigError, RequestError
from afterglow.importance import in_host
from afterglow.importance.chunk_loader import ChunkLoader
from afterglow.importance.select import SelectionRules
from afterglow.plan.batching.admission import MIN_ASKING_ROWS
from afterglow.request import Output, Request, SamplingParams, completion_of
from afterglow.store.extents.means import chunk_means
from tests.engine.by_hand import ask_truncated, logprobs, reference
from tests.engine.conftest import FAMILIES, OTHER_SCORES, VOCAB, Handle, in_turn
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


def loader_of(handle: Handle) -> ChunkLoader:
    important = handle.engine.parts.selective
    assert important is not None
    return important.loader


def rewritten(loader: ChunkLoader) -> int:
    """Have all extents rewritten now whose rows would lie otherwise; how many that are. On the engine's thread."""
    before = loader.stats.reordered
    loader.look()
    while loader.rewriting:
        loader.rewrite()
        time.sleep(0.001)
    return loader.stats.reordered - before


def reorder(handle: Handle) -> int:
    return handle.engine.ask(lambda: rewritten(loader_of(handle)))


def draw(seed: object, n: int) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(VOCAB) for _ in range(n)]


def attend_to(handle: Handle, prefix: list[int], rules: SelectionRules, system: int = 0) -> SelectingAttend:
    """Attend as the engine does, to rows that are all in memory."""
    decoder, config = handle.engine.decoder, handle.engine.config
    rows = prefill(decoder, prefix)
    rest = left_out(means_of(decoder, rows), system) if config.importance_rest == "means" else None
    return SelectingAttend(decoder, rows, rules, system=system, renew=config.importance_renew > 0, left_out=rest)


def expected(handle: Handle, prefix: list[int], new: list[int], retention: float, steps: int) -> list[torch.Tensor]:
    """Log-probabilities of the tokens to come, drawing greedily, from rows that are all in memory."""
    decoder, config = handle.engine.decoder, handle.engine.config
    rules = SelectionRules(
        retention=retention, mass=config.importance_mass, alpha=config.importance_alpha,
        fallback=config.importance_fallback,
    )  # fmt: skip
    with torch.inference_mode():
        attend = attend_to(handle, prefix, rules)
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


@pytest.mark.parametrize("tier", ["device", "host"])
def test_rows_in_memory_are_used_as_they_are(start: Start, model_of: Models, tmp_path: Path, tier: str) -> None:
    handle = start(model_of("llama"), tmp_path, importance=1.0, source="auto")
    prefix, new = draw("memory", ROWS), draw(tier, NEW)
    handle.ask(prefix, max_tokens=1)
    if tier == "host":
        handle.engine.settle()
        handle.engine.demote(tier)
    done = ask(handle, [*prefix, *new], 0.25)
    same(done, ask(handle, [*prefix, *new], None, reuse=False))
    assert (done.selected, getattr(done.cached, tier)) == (None, ROWS)


@pytest.mark.parametrize("tier", ["host", "disk", "restart"])
@pytest.mark.parametrize("family", in_turn(name for name in FAMILIES if name not in OTHER_SCORES))
def test_a_selection_is_what_it_is_in_memory(
    start: Start, model_of: Models, tmp_path: Path, family: str, tier: str
) -> None:
    model = model_of(family)
    handle = start(model, tmp_path, importance=1.0, importance_exact="never", importance_rest="means")
    prefix, new = draw(family, ROWS), draw(tier, NEW)
    handle.ask(prefix, max_tokens=1)
    handle = place(handle, tier, start, model, tmp_path, importance_exact="never", importance_rest="means")
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


@pytest.mark.parametrize(("before", "after"), [(16, 16), (32, 32), (64, 256), (128, 64), (16, 64), (64, 32)])
def test_chunks_of_other_sizes(start: Start, model_of: Models, tmp_path: Path, before: int, after: int) -> None:
    """Files are read with any size of 64 or more that they were written with; smaller ones have a cache of their own."""
    model, prefix, new = model_of("llama"), draw("chunks", ROWS), draw("new", NEW)
    handle = start(model, tmp_path, importance=1.0, importance_exact="never", importance_chunk=before)
    handle.ask(prefix, max_tokens=1)
    handle = place(handle, "restart", start, model, tmp_path, importance_exact="never", importance_chunk=after)
    done = ask(handle, [*prefix, *new], 0.25)
    if before != after and min(before, after) < 64:
        assert (done.selected, done.cached.total) == (None, 0)
        return
    assert done.selected is not None
    agree(done, expected(handle, prefix, new, 0.25, 3))
    assert loader_of(handle).chunk_rows == after


def test_a_chunk_has_one_of_these_sizes() -> None:
    with pytest.raises(ConfigError, match="--importance-chunk must be one of 16, 32, 64, 128, 256, got 48"):
        EngineConfig(importance_chunk=48)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("rest", ["means", "forget"])
def test_rows_in_another_order_change_no_answer(start: Start, model_of: Models, tmp_path: Path, rest: str) -> None:
    options: dict[str, Any] = {"importance_exact": "never", "importance_share": 0.0, "importance_rest": rest}
    handle = start(model_of("qwen2"), tmp_path, importance=1.0, **options)
    prefix = draw(1, ROWS)
    handle.ask(prefix, max_tokens=1)
    handle.engine.settle()
    handle.engine.demote("disk")
    prompts = [[*prefix, *draw(i, NEW)] for i in range(4)]
    before = [ask(handle, prompt, 0.2) for prompt in prompts]
    loader = loader_of(handle)
    assert reorder(handle) == 1
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
    assert done.selected.rows == ROWS - MIN_ASKING_ROWS
    agree(done, expected(handle, prompt[:-MIN_ASKING_ROWS], prompt[-MIN_ASKING_ROWS:], 0.3, 3))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_rows_behind_the_prefix_change_no_answer(start: Start, model_of: Models, tmp_path: Path, tier: str) -> None:
    """Another conversation goes on in the chunk with which the prefix ends: the mean of that chunk stands for nothing."""
    prefix, new = draw("fork", 150), draw("asked", NEW)
    found = []
    for folder, rest in (("one", "means"), ("two", "means"), ("other", "forget")):
        handle = start(
            model_of("llama"), tmp_path / folder, importance=1.0, importance_exact="never", importance_rest=rest
        )
        handle.ask([*prefix, *draw(folder, 80)], max_tokens=1)
        handle.engine.settle()
        handle.engine.demote(tier)
        found.append(ask(handle, [*prefix, *new], 0.2))
        assert found[-1].selected is not None
        assert found[-1].selected.rows == 150
    same(*found[:2])
    assert found[2].logprobs != found[0].logprobs


def test_means_of_rows_in_host_are_made_once(
    start: Start, model_of: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leave memory with what is deleted."""
    made = []

    def counted(layout: Any, rows: int, *stored: Any) -> Any:
        made.append(rows)
        return chunk_means(layout, rows, *stored)

    monkeypatch.setattr(in_host, "chunk_means", counted)
    handle = start(model_of("llama"), tmp_path, importance=1.0, importance_exact="never", importance_rest="means")
    prefix = draw("made", ROWS)
    for again in (0, 1):
        handle.ask(prefix, max_tokens=1)
        handle.engine.settle()
        handle.engine.demote("host")
        for number in range(3):
            assert ask(handle, [*prefix, *draw(number, NEW)], 0.3).selected is not None
        assert len(made) == (again + 1) * handle.engine.decoder.spec.layers
        handle.engine.reset_cache()


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_of_a_truncated_conversation_all_is_what_it_is_without(
    start: Start, model_of: Models, tmp_path: Path, family: str
) -> None:
    """Positions are those in the truncated context, and its private rows can be selected from."""
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
    assert (logprobs(outputs) - wanted.cpu()).abs().max() < 1e-4
    part = ask_truncated(handle.engine, [*text, *new[:-1], 0], turns=turns, kv_retention=0.3)
    assert part[0].selected is not None
    assert part[0].selected.kept < 0.4 * part[0].selected.rows


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("rows", [64, 128, 192])
def test_a_chain_of_extents_is_one_prefix(start: Start, model_of: Models, tmp_path: Path, rows: int, tier: str) -> None:
    """Chunks begin anew with each extent, and so do the means: here both are those of one prefix."""
    model, text = model_of("llama"), draw("chain", 2 * ROWS)
    handle = start(model, tmp_path, importance=1.0, importance_exact="never", importance_rest="means")
    for prefix in (text[:rows], [*text[:rows], *draw("another turn", 70)], text):  # the branch keeps the extents two
        handle.ask(prefix, max_tokens=1)
    handle.engine.settle()
    handle.engine.demote(tier)  # type: ignore[arg-type]
    begin, selections = SelectiveAttention.begin, []

    def kept(self: SelectiveAttention, *args: Any) -> PrefixSelection:
        selections.append(begin(self, *args))
        return selections[-1]

    new = draw(tier, NEW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelectiveAttention, "begin", kept)
        done = ask(handle, [*text, *new], 0.25)
    assert [view.stop - view.start for view in selections[0].prefix.views][:1] == [rows]
    assert len(selections[0].prefix.views) > 1
    agree(done, expected(handle, text, new, 0.25, 3))


@pytest.mark.parametrize("rest", ["means", "forget"])
@pytest.mark.parametrize("retention", [0.2, 0.6])
def test_a_registered_prompt_is_attended_to_as_a_whole(
    start: Start, model_of: Models, tmp_path: Path, retention: float, rest: str
) -> None:
    """X8: rows are not selected from the system prompt, and it takes its share of the attention."""
    handle = start(model_of("llama"), tmp_path, importance=1.0, importance_exact="never", importance_rest=rest)
    system = 128 if rest == "means" else 90  # means begin anew behind the prompt: here both are those of one prefix
    prompt, new = draw("system", system), draw(2, NEW)
    handle.engine.register_prefix("system", prompt, salt=None)
    prefix = [*prompt, *draw(1, 140)]
    ask(handle, prefix, 1.0, max_tokens=1, salt="another")
    handle.engine.settle()
    handle.engine.demote("disk")
    done = ask(handle, [*prefix, *new], retention, salt="another")
    assert done.selected is not None
    assert done.selected.kept == system + round(retention * 140)
    decoder = handle.engine.decoder
    with torch.inference_mode():
        attend = attend_to(handle, prefix, SelectionRules(retention=retention), system=system)
        wanted = decoder.logits(attend.extend(new)[-1:])[0].log_softmax(-1)
    agree(replace(done, logprobs=done.logprobs[:1]), [wanted])


def test_a_registered_prompt_is_loaded_as_a_whole_after_a_restart(
    start: Start, model_of: Models, tmp_path: Path
) -> None:
    """Also where requests select from cached rows by default."""
    prompt = draw("system", 90)
    for cached in (0, 89):
        handle = start(model_of("llama"), tmp_path, importance=0.4, warm_start=False)
        found = handle.engine.register_prefix("system", prompt, salt=None)
        assert (found.cached, found.host, found.disk) == (cached, 90, 90)
        handle.engine.close()


# ---------------------------------------------------------------------------------------- selecting by decoded tokens

BUNDLED = Path(str(files("afterglow") / "assets" / "model"))


@pytest.mark.parametrize("rest", ["means", "forget"])
@pytest.mark.parametrize("renew", [0, 1])
@pytest.mark.parametrize("fallback", ["per_head", "all"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_renewed_selection_is_what_it_is_in_memory(
    start: Start, model_of: Models, tmp_path: Path, tier: str, fallback: str, renew: int, rest: str
) -> None:
    options: dict[str, Any] = {"importance_exact": "never", "importance_renew": renew, "importance_fallback": fallback}
    handle = start(model_of("llama"), tmp_path, importance=1.0, importance_alpha=1.0, importance_rest=rest, **options)
    prefix, new = draw("renew", ROWS), draw(tier, NEW)
    handle.ask(prefix, max_tokens=1)
    handle.engine.settle()
    handle.engine.demote(tier)  # type: ignore[arg-type]
    for retention in (0.1, 0.4):
        done = ask(handle, [*prefix, *new], retention, max_tokens=12)
        agree(done, expected(handle, prefix, new, retention, 12))
        assert done.selected is not None
        assert done.selected.renewals == (11 if renew else 0)
        assert done.selected.kept <= done.selected.taken <= ROWS
        if renew and fallback == "per_head":
            assert done.selected.taken > done.selected.kept
    stats = handle.engine.stats().importance
    assert stats is not None
    assert (stats.renewals > 0) == (stats.renewed_rows > 0) == bool(renew)
    assert stats.failed_renewals == 0


@pytest.mark.parametrize("renew", [0, 1])
@pytest.mark.parametrize("alpha", [0.0, 20.0])  # a set for each head, one set for all
@pytest.mark.parametrize(("tier", "rest"), [("host", "means"), ("disk", "means"), ("disk", "forget")])
def test_a_layer_takes_as_many_rows_as_hold_a_share_of_its_attention(
    start: Start, model_of: Models, tmp_path: Path, tier: str, rest: str, alpha: float, renew: int
) -> None:
    options: dict[str, Any] = {"importance_exact": "never", "importance_renew": renew, "importance_alpha": alpha}
    handle = start(model_of("llama"), tmp_path, importance=1.0, importance_mass=0.6, importance_rest=rest, **options)
    prefix, new = draw("mass", ROWS), draw(tier, NEW)
    handle.ask(prefix, max_tokens=1)
    handle.engine.settle()
    handle.engine.demote(tier)  # type: ignore[arg-type]
    done = ask(handle, [*prefix, *new], 0.95, max_tokens=12)
    agree(done, expected(handle, prefix, new, 0.95, 12))
    assert done.selected is not None
    assert 0 < done.selected.kept < 0.9 * ROWS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"importance": 0.5, "importance_mass": 0.0},
            "--importance-mass is a share, more than 0 and at most 1, got 0.0",
        ),
        ({"importance": 0.5, "importance_mass": 1.5}, "at most 1, got 1.5"),
        ({"importance_mass": 0.9}, "--importance-mass does nothing without --importance"),
        ({"importance_chunk": 16}, "--importance-chunk does nothing without --importance"),
        ({"importance_rest": "means"}, "--importance-rest does nothing without --importance"),
        ({"importance_renew": 16}, "--importance-renew does nothing without --importance"),
        ({"importance_alpha": 0.3}, "--importance-alpha does nothing without --importance"),
        ({"importance_fallback": "all"}, "--importance-fallback does nothing without --importance"),
        ({"importance_exact": "approximate"}, "--importance-exact does nothing without --importance"),
        ({"importance_share": 0.5}, "--importance-share does nothing without --importance"),
        ({"reorder_interval": 5.0}, "--reorder-interval does nothing without --importance"),
    ],
)
def test_shares_of_the_attention_that_make_no_sense(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)  # type: ignore[arg-type]


def test_every_so_many_tokens(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(model_of("llama"), tmp_path, importance=1.0, importance_exact="never", importance_renew=4)
    prefix = draw(1, ROWS)
    handle.ask(prefix, max_tokens=1)
    handle.engine.settle()
    done = ask(handle, [*prefix, *draw(2, NEW)], 0.3, max_tokens=14)  # 13 are decoded
    assert done.selected is not None
    assert done.selected.renewals == 3
    whole = ask(handle, [*prefix, *draw(2, NEW)], 0.9999, max_tokens=14)
    assert whole.selected is not None
    assert (whole.selected.renewals, whole.selected.taken) == (0, ROWS)
    stats = handle.engine.stats().importance
    assert stats is not None
    assert stats.renewals == 3 * 2  # of two layers; none where all rows are taken


def test_what_is_renewed_stays_where_it_is(start: Start, model_of: Models, tmp_path: Path) -> None:
    """Host slots that a reply selects from are kept for it until it ends, however many requests need slots."""
    every, steps = 16, 40
    handle = start(
        model_of("llama"), tmp_path, importance=1.0, importance_exact="never", importance_share=0.0,
        importance_renew=every, host_cache=24 * 64 * 256, max_batch=2,
    )  # fmt: skip
    prefix, new = draw(1, ROWS), draw(2, NEW)
    handle.ask(prefix, max_tokens=1)
    handle.engine.settle()
    sampling = SamplingParams(max_tokens=steps, temperature=0, logprobs=VOCAB, ignore_eos=True)
    requests = [Request("long", [*prefix, *new], sampling, kv_retention=0.1)]
    short = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    requests += [Request(f"other{i}", draw(("other", i), 300), short) for i in range(14)]
    done = handle.engine.generate(requests)[0]
    agree(done, _renewed_every(handle, prefix, new, 0.1, steps, every))
    stats = handle.engine.stats()
    assert stats.importance is not None
    assert stats.importance.renewed_rows > 0
    assert stats.importance.failed_renewals == 0


def _renewed_every(
    handle: Handle, prefix: list[int], new: list[int], retention: float, steps: int, every: int
) -> list[torch.Tensor]:
    decoder = handle.engine.decoder
    rules = SelectionRules(retention=retention, alpha=handle.engine.config.importance_alpha)
    with torch.inference_mode():
        attend, ids, found = attend_to(handle, prefix, rules), new, []
        for step in range(steps):
            attend.renew = step > 0 and step % every == 0
            found.append(decoder.logits(attend.extend(ids)[-1:])[0].log_softmax(-1))
            ids = [int(found[-1].argmax())]
    return found


@pytest.mark.parametrize("damage", ["removed", "garbled"])
def test_what_cannot_be_read_any_more_is_done_without(
    start: Start, model_of: Models, tmp_path: Path, damage: str
) -> None:
    """Chunks that are lost while a reply is being decoded: it goes on with what the layers had, and that is told."""
    handle = start(
        model_of("llama"),
        tmp_path,
        importance=1.0,
        importance_exact="never",
        importance_share=0.0,
        importance_alpha=2.0,
    )
    prefix, new = draw(1, ROWS), draw(2, NEW)
    handle.ask(prefix, max_tokens=1)
    handle.engine.settle()
    handle.engine.demote("disk")
    (path,) = [p for p in tmp_path.glob("*/extents/*/*.safetensors") if p.stat().st_size > 60_000]
    whole = path.read_bytes()
    wanted = expected(handle, prefix, new, 0.02, 1)
    prompt_only = _renewed_every(handle, prefix, new, 0.02, 6, 100)
    seen: list[int] = []
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()

    def take(output: Output) -> None:  # on the engine's thread: the prompt has been computed, nothing decoded yet
        if not seen:
            if damage == "removed":
                path.unlink()
            else:
                path.write_bytes(whole[:20_000] + bytes(len(whole) - 20_000))
        seen.extend(output.tokens)
        outputs.put(output)

    sampling = SamplingParams(max_tokens=6, temperature=0, logprobs=VOCAB, ignore_eos=True)
    handle.engine.submit(Request("damaged", [*prefix, *new], sampling, kv_retention=0.02), take)
    found = [outputs.get(timeout=30)]
    while found[-1].finish_reason is None:
        found.append(outputs.get(timeout=30))
    done = completion_of(found, 0.0)
    assert len(done.tokens) == 6
    agree(replace(done, logprobs=done.logprobs[:1]), wanted)
    stats = handle.engine.stats().importance
    assert stats is not None
    assert stats.failed_renewals == 1
    assert done.selected is not None
    assert done.selected.renewals == 1  # it is not tried again
    agree(done, prompt_only)
    handle.engine.settle()
    exact = handle.ask([*prefix, *new], max_tokens=3)
    same(exact, handle.ask([*prefix, *new], reuse=False, max_tokens=3))


def test_a_file_that_is_rewritten_meanwhile(start: Start, model_of: Models, tmp_path: Path) -> None:
    """Reordering makes a new version of a file while a reply selects from it: its rows are found all the same."""
    handle = start(
        model_of("llama"),
        tmp_path,
        importance=1.0,
        importance_exact="never",
        importance_share=0.0,
        importance_alpha=2.0,
    )
    prefix, new = draw(1, ROWS), draw(2, NEW)
    handle.ask(prefix, max_tokens=1)
    handle.engine.settle()
    handle.engine.demote("disk")
    loader = loader_of(handle)
    begun: list[int] = []
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()

    def take(output: Output) -> None:
        if not begun:
            begun.append(rewritten(loader))
        outputs.put(output)

    sampling = SamplingParams(max_tokens=6, temperature=0, logprobs=VOCAB, ignore_eos=True)
    handle.engine.submit(Request("rewritten", [*prefix, *new], sampling, kv_retention=0.02), take)
    found = [outputs.get(timeout=30)]
    while found[-1].finish_reason is None:
        found.append(outputs.get(timeout=30))
    assert begun == [1]
    agree(completion_of(found, 0.0), expected(handle, prefix, new, 0.02, 6))
    assert loader.stats.failed_renewals == 0


def test_a_reply_finds_the_facts_that_its_prompt_did_not_ask_for(start: Start, tmp_path: Path) -> None:
    """The bundled model: facts recalled by exact requests, and with a share of the prefix, renewed or not."""
    prefix, questions = _facts()
    recalled: dict[tuple[float, int], int] = {}
    for renew in (0, 1):
        handle = start(
            BUNDLED, tmp_path / str(renew), importance=1.0, importance_exact="never", importance_renew=renew,
            device_cache=2**27, host_cache=2**27,
        )  # fmt: skip
        ask_plainly(handle, prefix, 1.0, 1)
        handle.engine.settle()
        handle.engine.demote("disk")
        for retention in (1.0, 0.5, 0.25):
            told = [ask_plainly(handle, [*prefix, *prompt], retention, at + 1) for prompt, at, _ in questions]
            recalled[retention, renew] = sum(
                tokens[at] == value for tokens, (_, at, value) in zip(told, questions, strict=True)
            )
    assert recalled[1.0, 0] == recalled[1.0, 1] >= len(questions) - 2
    for retention in (0.5, 0.25):
        assert recalled[retention, 1] >= recalled[1.0, 1] - 1
        assert recalled[retention, 0] <= recalled[retention, 1]
    assert recalled[0.25, 0] <= recalled[0.25, 1] - 3  # why it is on


def ask_plainly(handle: Handle, prompt: list[int], retention: float, max_tokens: int) -> tuple[int, ...]:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    (done,) = handle.engine.generate([Request(f"f{next(_ids)}", prompt, sampling, kv_retention=retention)])
    return done.tokens


def _facts() -> tuple[list[int], list[tuple[list[int], int, int]]]:
    """A dialogue in which facts are told, and a question about each: its tokens, and which token of the reply is the value."""
    sentences = [
        "Return the value of the object.",
        "This is a list of names.",
        "Raise an error if the file is missing.",
    ]
    (shared,) = prefixes.dialogues(BUNDLED, sentences, count=1, tokens=700, facts=8, seed=1)
    asked = [query for query in shared.queries if query.value is not None]
    return shared.prefix, [(q.prompt, q.value, q.reply[q.value]) for q in asked if q.value is not None]


# ------------------------------------------------------------------------------------------------- beside other features


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(
    ("relay", "chunk", "truncated", "tier"),
    [  # every pair of values of any two features
        ("on", 0, False, "host"),
        ("on", 64, True, "disk"),
        ("off", 0, True, "disk"),
        ("off", 64, False, "host"),
        ("on", 64, False, "disk"),
        ("off", 0, True, "host"),
    ],
)
def test_of_the_whole_prefix_the_answer_is_exact(
    start: Start,
    model_of: Models,
    tmp_path: Path,
    relay: str,
    chunk: int,
    truncated: bool,
    tier: str,
    quantization: str,
) -> None:
    """Retention 1, and nearly 1 (which goes the way of selections): what the same engine gives without any reuse."""
    handle = start(
        model_of("llama"), tmp_path, importance=1.0, importance_exact="never", relay=relay, prefill_chunk=chunk,
        quantization=quantization, **({"max_model_len": WINDOW} if truncated else {}),
    )  # fmt: skip
    if truncated:
        text = draw("cut", SYSTEM + 5 * TURN)
        for rows in range(SYSTEM + TURN, len(text) + 1, TURN):
            ask_truncated(handle.engine, text[:rows], turns=turns_of(rows))
        handle.engine.settle()
        handle.engine.demote(tier)  # type: ignore[arg-type]
        turns, new = turns_of(len(text) + TURN), draw("new", TURN)
        found = [
            logprobs(ask_truncated(handle.engine, text + new, turns=turns, kv_retention=share))
            for share in (1.0, 0.9999)
        ]
        assert (found[0] - found[1]).abs().max() < (1e-4 if quantization == "none" else 0.2)
        return
    prefix = draw("matrix", ROWS)
    handle.ask(prefix, max_tokens=1)
    handle.engine.settle()
    handle.engine.demote(tier)  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=4, temperature=0, logprobs=VOCAB, ignore_eos=True)
    prompts = [[*prefix, *draw(("own", i), 70)] for i in range(4)]
    shares = (1.0, 0.9999, 1.0, 0.9999)
    requests = [
        Request(f"m{next(_ids)}", prompt, sampling, kv_retention=share)
        for prompt, share in zip(prompts, shares, strict=True)
    ]
    for done, prompt, share in zip(handle.engine.generate(requests), prompts, shares, strict=True):
        assert done.cached.total == ROWS
        assert (done.selected is not None) == (share < 1)
        exact = handle.ask(prompt, reuse=False)
        if quantization == "none":
            same(done, exact)
        else:  # activations are rounded
            first = [dict(answer.logprobs[0].top) for answer in (done, exact)]
            assert max(abs(first[0][token] - first[1][token]) for token in first[0]) < 0.2


def test_what_is_important_to_one_tenant_moves_nothing_of_another(
    start: Start, model_of: Models, tmp_path: Path
) -> None:
    """X4: importance of rows, their order on disk, and cached chunks belong to extents, and an extent belongs to one tenant."""
    handle = start(model_of("llama"), tmp_path, importance=1.0, importance_exact="never", importance_share=0.25)
    prefix, new = draw(1, ROWS), draw(2, NEW)
    files: dict[str, set[Path]] = {}
    for salt in ("a", "b"):
        before = set().union(*files.values()) if files else set()
        ask(handle, prefix, 1.0, salt=salt, max_tokens=1)
        handle.engine.settle()
        files[salt] = set(tmp_path.glob("*/extents/*/*.safetensors")) - before
    handle.engine.demote("disk")
    theirs = {path: (path.read_bytes(), path.stat().st_ino) for path in files["b"]}
    loader = loader_of(handle)
    for i in range(5):
        ask(handle, [*prefix, *draw(("a", i), NEW)], 0.1, max_tokens=6, salt="a")
    of_a = {path.stem for path in files["a"]}
    assert set(loader.importance) <= of_a
    assert loader.importance
    assert {name.extent for place in ("device", "host") for name in loader.cache.placement.members(place)} <= of_a
    assert reorder(handle) == 1
    assert {path: (path.read_bytes(), path.stat().st_ino) for path in files["b"]} == theirs
    done = ask(handle, [*prefix, *new], 0.1, salt="b")
    agree(done, expected(handle, prefix, new, 0.1, 3))
    after = ask(handle, [*prefix, *new, *done.tokens], 1.0, salt="a")  # exact, after all that
    assert after.cached.total == ROWS
    same(after, handle.ask([*prefix, *new, *done.tokens], reuse=False, max_tokens=3))
