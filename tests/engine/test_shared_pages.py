"""Contexts with equal beginnings have pages of the device in common: memory follows what is different, and no answer changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afterglow.engine.engine import Engine
from afterglow.request import Completion, Request, SamplingParams
from tests import doors
from tests.engine.conftest import FAMILIES, VOCAB, Handle, in_turn, write_model
from tests.engine.test_exact_reuse import same
from tests.engine.test_windows import LONG

Start = Callable[..., Handle]
Models = Callable[[str], Path]

ROW = 64  # tokens of a page


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def together(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[Completion]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=VOCAB, ignore_eos=True)
    return engine.generate([Request(f"t{random.random()}", prompt, params) for prompt in prompts])


def pages_held(handle: Handle) -> int:
    """Count the pages that contexts hold, each once: as the pool has lent them, and as the contexts list them."""
    pool = handle.engine.stats().pool
    listed = {id(page) for context in doors.contexts_of(handle.engine.parts.runner) for page in context.whole}
    assert pool.pages == len(listed)
    assert pool.page_bytes == pool.pages * page_bytes(handle) <= pool.slab_bytes
    return pool.pages


def page_bytes(handle: Handle) -> int:
    return ROW * int(handle.engine.parts.runner.shape.row_bytes)


@pytest.fixture
def long_model(tmp_path: Path) -> Path:
    return write_model({**FAMILIES["llama"], "max_position_embeddings": 4096}, tmp_path / "model")


@pytest.fixture(autouse=True)
def garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    doors.fill_new_contexts(monkeypatch, float("nan"))


@pytest.fixture(autouse=True)
def each_step_is_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    checked = doors.check_each_budget(monkeypatch)
    yield
    assert len(checked) > 3
    assert any(held == counted for held, counted in checked)


@pytest.mark.parametrize("relay", ["off", "on"])
def test_requests_behind_the_same_tokens_hold_them_once(start: Start, long_model: Path, relay: str) -> None:
    """32 requests behind 2,048 tokens: one prefix, and two pages of their own each. The plan counts the same."""
    rng = random.Random(1)
    handle = start(long_model, device_cache=ROW * 200 * 1024, host_cache=2**24, max_batch=32, relay=relay)
    head = words(rng, 2048)
    prompts = [[*head, *words(rng, 64)] for _ in range(32)]
    expected = handle.ask(prompts[7], reuse=False, max_tokens=30)
    handle.ask(head, max_tokens=1)
    handle.engine.settle()
    done = together(handle.engine, prompts, 30)
    same(done[7], expected)
    assert all(each.cached.device >= 2047 // ROW * ROW for each in done)
    handle.engine.settle()
    assert pages_held(handle) == 32 + 32 * 2
    assert handle.engine.stats().tiers.device.used == pages_held(handle) * page_bytes(handle)
    handle.engine.parts.scheduler.check()


def test_layers_that_hold_all_rows_share_pages_beside_others_that_hold_the_last(start: Start, tmp_path: Path) -> None:
    """16 requests behind 2,048 tokens, two layers of three with a window: one prefix in the third. The plan counts as much for layers with a
    window as each may come to hold."""
    rng = random.Random(1)
    config = {**FAMILIES["gemma3_text"], "num_hidden_layers": 3, "layer_types": LONG["layer_types"], "head_dim": 16}
    model = write_model({**config, "max_position_embeddings": 4096}, tmp_path / "model")
    options = {"device_cache": ROW * 400 * 1024, "host_cache": 2**24, "max_batch": 16, "prefill_chunk": 32}
    handle = start(model, **options)
    held, layers = handle.engine.parts.runner.shape.held, 3
    head = words(rng, 2048)
    prompts = [[*head, *words(rng, 64)] for _ in range(16)]
    expected = handle.ask(prompts[7], reuse=False, max_tokens=30)
    handle.ask(head, max_tokens=1)
    handle.engine.settle()
    done = together(handle.engine, prompts, 30)
    same(done[7], expected)
    handle.engine.settle()
    whole = (32 + 16 * 2) * ROW * (layers - held.windowed)
    taken = handle.engine.stats().tiers.device.used
    row = handle.engine.parts.runner.shape.row_bytes
    assert held.windowed > 0
    assert taken <= -(-(whole + 17 * held.windowed * held.most) // layers) * row
    pool = handle.engine.stats().pool
    assert pool.page_bytes <= min(taken, pool.slab_bytes)
    assert pool.page_bytes >= whole * row // layers, "the prefix once, and what is each request's own"
    handle.engine.parts.scheduler.check()


def test_a_request_begins_with_the_pages_of_one_that_runs(start: Start, long_model: Path) -> None:
    """The first one still decodes when the others come."""
    rng = random.Random(2)
    handle = start(long_model, device_cache=ROW * 100 * 1024, max_batch=8)
    head = words(rng, 512)
    prompts = [[*head, *words(rng, 20)] for _ in range(4)]
    expected = [handle.ask(prompt, reuse=False, max_tokens=60) for prompt in prompts]
    done = together(handle.engine, prompts, 60)
    for ours, theirs in zip(done, expected, strict=True):
        same(ours, theirs)
    assert [each.cached.device for each in done[1:]] == [512] * 3
    handle.engine.settle()
    assert pages_held(handle) <= 8 + 4 * 2


@pytest.mark.parametrize("family", in_turn(("llama", "gpt_neox", "phi3", "qwen2")))
def test_forks_of_a_conversation_do_not_write_into_each_others_pages(
    start: Start, model_of: Models, family: str
) -> None:
    """Beginnings that end anywhere in a page, from contexts that go on, are taken over, or have been left."""
    rng = random.Random(family)
    handle = start(model_of(family), device_cache=ROW * 100 * 1024, max_batch=4)
    texts = [words(rng, 200)]
    for _ in range(12):
        prompts: list[list[int]] = []
        for _ in range(rng.randint(1, 3)):
            text = rng.choice(texts)
            prompts.append([*text[: rng.randint(1, len(text))], *words(rng, rng.randint(1, 70))])
        done = together(handle.engine, prompts, rng.choice([1, 8]))
        for prompt, each in zip(prompts, done, strict=True):
            same(each, handle.ask(prompt, reuse=False, max_tokens=len(each.tokens)))
            texts.append([*prompt, *each.tokens])
        if rng.random() < 0.2:
            handle.engine.demote("host")
        handle.engine.settle()
        handle.engine.parts.scheduler.check()
        assert handle.engine.stats().tiers.device.used == pages_held(handle) * page_bytes(handle)


@pytest.mark.parametrize("relay", ["off", "on"])
def test_after_a_truncation_what_conversations_still_share_is_shared(
    start: Start, long_model: Path, relay: str
) -> None:
    """Four conversations behind 512 tokens outgrow their window: what each keeps begins with the pages that they had in common. A prompt
    of the very tokens that one of them keeps has other rows behind these pages: those of the conversation have seen what it dropped."""
    rng = random.Random(3)
    head = words(rng, 512)
    before = [[*head, *words(rng, 478)] for _ in range(4)]
    after = [[*prompt, *words(rng, 100)] for prompt in before]
    config = {"device_cache": ROW * 200 * 1024, "max_batch": 8, "max_model_len": 1024, "relay": relay}

    def turns(engine: Engine, prompts: list[list[int]]) -> list[Completion]:
        params = SamplingParams(max_tokens=30, temperature=0, logprobs=VOCAB, ignore_eos=True)
        places = (512, 736, 896)
        return engine.generate(
            [Request(f"c{random.random()}", each, params, truncation=True, turns=places) for each in prompts]
        )

    expected = []
    for first, then in zip(before[:2], after[:2], strict=True):
        alone = start(long_model, **config)
        turns(alone.engine, [first])
        expected += turns(alone.engine, [then])
    handle = start(long_model, **config)
    turns(handle.engine, [*before, [*head, *after[0][896:]]])
    handle.engine.settle()
    assert pages_held(handle) == 8 + 4 * 8 + 4
    done = turns(handle.engine, after)
    handle.engine.settle()
    assert all(each.truncation is not None and each.truncation.reused for each in done)
    for ours, theirs in zip(done, expected, strict=False):
        same(ours, theirs)
    assert pages_held(handle) == 8 + 4 * 8 + 4 + 4 * 4, (
        "the conversations as they were, and behind the same head as they are"
    )
    assert handle.engine.stats().tiers.device.used == pages_held(handle) * page_bytes(handle)
    handle.engine.parts.scheduler.check()
