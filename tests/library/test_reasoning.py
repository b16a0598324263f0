"""Reasoning in the library: apart from the text, before a grammar, and out of the next turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from afterglow import LanguageModel, SamplingParams
from afterglow.request import Grammar
from tests.reasoning_templates import FORMATS, THOUGHT
from tests.scripted_model import Scripted, scripted

ASK = [{"role": "user", "content": "Rain?"}]


@pytest.fixture(scope="module", params=["r1", "harmony"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LanguageModel, Scripted, str]]:
    template, specials, eos, thought = FORMATS[request.param]
    folder: Path = tmp_path_factory.mktemp(request.param)
    with scripted(folder, template, specials, eos) as server:
        yield LanguageModel(server.engine, server.tokenizer), server, thought


def test_reasoning_is_no_part_of_the_text(model: tuple[LanguageModel, Scripted, str]) -> None:
    language_model, server, thought = model
    server.say(f"{thought}Yes.", f"{thought}Yes.")
    whole = language_model.chat(ASK, SamplingParams(max_tokens=200))
    assert (whole.reasoning, whole.text) == (THOUGHT, "Yes.")
    reply = language_model.stream_chat(ASK, SamplingParams(max_tokens=200))
    assert "".join(reply) == reply.text == "Yes."
    assert reply.reasoning == THOUGHT


def test_the_next_turn_is_computed_ahead(model: tuple[LanguageModel, Scripted, str]) -> None:
    language_model, server, thought = model
    server.say(f"{thought}It rains today.", f"{thought}Yes.")
    first = language_model.chat(ASK, SamplingParams(max_tokens=200), salt="ahead")
    server.engine.settle()
    more = [*ASK, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Much?"}]
    second = language_model.stream_chat(more, SamplingParams(max_tokens=200), salt="ahead")
    assert "".join(second) == "Yes."
    new = server.tokenizer.decode(second.request.prompt[second.cached.total :], False)
    assert "It rains" not in new
    assert "Much" in new


def test_a_grammar_begins_behind_the_reasoning(model: tuple[LanguageModel, Scripted, str]) -> None:
    language_model, _, _ = model
    grammar = Grammar("choice", json.dumps(["dry", "wet"]))
    request = language_model.stream_chat(ASK, SamplingParams(max_tokens=200, grammar=grammar)).request
    assert request.sampling.grammar is not None
    assert "@answer" in request.sampling.grammar.before
