"""Constrained replies whatever the engine does beside them: requests sent back, shared prefixes, truncation, journals, faults."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from afterglow import CacheConfig, EngineConfig, LanguageModel, RequestError, SamplingParams, load_model
from afterglow.engine.grammars import masks
from afterglow.plan.journal.replaying import replay
from afterglow.plan.journal.step_digest import step_digest
from afterglow.request import Completion, Grammar, Request
from tests.structured_model import random_model

ITEMS = {"type": "array", "items": {"enum": ["red", "blue", 7, None]}, "minItems": 40, "maxItems": 50}
GRAMMAR = Grammar("json_schema", json.dumps(ITEMS), compact=True)
LONG = "The kite and the mill are near the river. " * 12
BLOCKS = 'start: "x" start | "x"'

_ids = count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("random"))


@contextmanager
def opened(folder: Path, *, device: int = 2**25, **options: Any) -> Iterator[LanguageModel]:
    cache = CacheConfig(device_cache=device, host_cache=2**25, disk_cache=0, source="load", warm_start=False)
    with load_model(folder, EngineConfig(cache=cache, threads=1, **options)) as model:
        yield model
        model.engine.settle()
        model.engine.ask(model.engine.parts.scheduler.check)


def requests(model: LanguageModel, many: int, prompt: str = "The kite", cut: int | None = None) -> list[Request]:
    """Two of three have a grammar. `cut`: tokens of their prompts."""
    made = []
    for number in range(many):
        sampling = SamplingParams(max_tokens=250, seed=number, grammar=GRAMMAR if number % 3 else None, ignore_eos=True)
        ids = model.tokenizer.encode(f"{prompt} {number}")[:cut]
        made.append(Request(f"r{next(_ids)}", ids, sampling))
    return made


def valid(replies: list[Completion]) -> None:
    for number, reply in enumerate(replies):
        if number % 3:
            assert reply.finish_reason == "stop"
            value = json.loads(reply.text)
            assert 40 <= len(value) <= 50
            assert all(item in ("red", "blue", 7, None) for item in value)


def test_requests_that_are_sent_back_go_on_in_their_grammar(folder: Path) -> None:
    """Four contexts of at most 310 rows on a device with room for 512 rows."""
    with opened(folder) as model:
        free = model.generate(requests(model, 4, LONG, cut=60))
        assert model.engine.stats().plan.counters.preemptions == 0
    with opened(folder, device=128 * 1024, max_batch=4) as model:
        tight = model.generate(requests(model, 4, LONG, cut=60))
        assert model.engine.stats().plan.counters.preemptions > 0
    valid(free)
    assert [reply.tokens for reply in tight] == [reply.tokens for reply in free]


@pytest.mark.parametrize("relay", ["on", "off"])
def test_shared_prefixes_change_no_reply(folder: Path, relay: str) -> None:
    with opened(folder, relay=relay) as model:
        model.generate(requests(model, 1, LONG))
        together = model.generate(requests(model, 6, LONG))
        groups = model.engine.stats().engine.relay.groups
        assert (groups > 0) == (relay == "on")
        valid(together)
        alone = [model.generate(request)[0] for request in requests(model, 6, LONG)]
    assert [reply.tokens for reply in together] == [reply.tokens for reply in alone]


def test_a_truncated_conversation_gives_constrained_replies(folder: Path) -> None:
    with opened(folder, max_model_len=512) as model:
        ids = model.tokenizer.encode("The kite is red, and the mill is old. " * 60)
        sampling = SamplingParams(max_tokens=250, seed=3, grammar=GRAMMAR)
        (reply,) = model.generate(Request("long", ids, sampling, truncation=True, turns=(40, 200, 400)))
        assert reply.truncation is not None
        assert len(ids) > 512
        valid([reply, reply])


def test_a_journal_of_constrained_replies_takes_the_same_steps(folder: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with opened(folder, journal=journal) as model:
        valid(model.generate(requests(model, 5)))
    steps = list(replay(journal.read_text().splitlines()))
    assert len(steps) > 20
    assert all(step_digest(step) == recorded for step, recorded in steps)


@pytest.mark.parametrize("fault", ["mask", "token", "slow"])
def test_a_grammar_that_breaks_ends_its_own_request_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """By the library's limits, a token that it does not take, or masks that take too long."""
    real: Callable[..., None] = masks.Constraint.compute
    computed = count()

    def broken(constraint: masks.Constraint, guesses: Sequence[int] = ()) -> None:
        real(constraint, guesses)
        if constraint.error is not None or next(computed) < 4:
            return
        constraint.error = f"broken by a {fault}"

    if fault == "slow":
        monkeypatch.setattr(masks, "SLOW_SECONDS", 0.0)
    else:
        monkeypatch.setattr(masks.Constraint, "compute", broken)
    with opened(folder) as model:
        prompt = model.tokenizer.encode("The kite")
        sampling = SamplingParams(max_tokens=60, seed=1, ignore_eos=True)
        grammar = Grammar("grammar", BLOCKS, param="guided_grammar")
        constrained = SamplingParams(max_tokens=60, seed=1, grammar=grammar, ignore_eos=True)
        free, bound = Request("free", prompt, sampling), Request("bound", prompt, constrained)
        outputs = {"free": [], "bound": []}  # type: ignore[var-annotated]
        for _, output in model.engine.outputs([free, bound]):
            outputs[output.request_id].append(output)
        assert outputs["free"][-1].finish_reason == "length"
        assert outputs["bound"][-1].finish_reason == "error"
        said = "too ambiguous" if fault == "slow" else "broken"
        assert re.search(said, outputs["bound"][-1].error or "")
        assert outputs["bound"][-1].param == "guided_grammar"
        tokens = [token for output in outputs["bound"] for token in output.tokens]
        assert 0 < len(tokens) < 60
        with pytest.raises(RequestError, match="cannot follow its grammar") as raised:
            model.generate(Request("again", prompt, constrained))
        assert (raised.value.status, raised.value.param) == (400, "guided_grammar")
        monkeypatch.undo()
        (reply,) = model.generate(Request("after", prompt, SamplingParams(max_tokens=60, seed=1, grammar=GRAMMAR)))
        assert reply.text.startswith("[")


def test_slow_masks_behind_guesses_end_the_guessing_and_no_reply(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder) as model:
        sampling = SamplingParams(max_tokens=60, grammar=Grammar("regex", "[a-f]{40}"))
        constraint = model.engine.grammars.constraint(sampling)
        assert constraint is not None
        guesses = [token for letter in "abcdefabcdefab" for token in model.tokenizer.encode(letter)]
        assert constraint.allowed(guesses) == len(guesses) > masks.MAX_SLOW + 1
        constraint.compute(guesses)
        assert constraint.positions == len(guesses) + 1
        monkeypatch.setattr(masks, "SLOW_SECONDS", 0.0)
        constraint.compute(guesses)
        assert constraint.positions == masks.MAX_SLOW + 2
        monkeypatch.undo()
        constraint.compute()
        assert constraint.error is None
        assert constraint.allowed(guesses) == 0
