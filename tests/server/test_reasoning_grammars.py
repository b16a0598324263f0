"""Grammars hold for what comes behind the reasoning: which tokens may come, and replies of random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afterglow.engine.grammars.compiler import Grammars
from afterglow.request import Grammar, SamplingParams
from afterglow.server.bodies.tool_fields import ToolUse
from afterglow.server.replies.make_requests import with_tool_grammar
from afterglow.text import Tokenizer
from tests import reasoning_templates as kit
from tests.reasoning_templates import FORMATS
from tests.scripted_model import Scripted, scripted

SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}, "s": {"enum": ["a", "b"]}},
    "required": ["n"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
ASK = {"role": "user", "content": "Well?"}
ANSWER = '{"n": 1}'


@pytest.fixture(scope="module", params=[*FORMATS, "qwen_added"])
def free(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scripted, str]]:
    """Servers on models whose tokens are their own: random, but for the grammar. `qwen_added`: the marks are tokens of their own,
    and no special ones, as Qwen's are."""
    template, specials, eos, thought = FORMATS[request.param.replace("added", "special")]
    folder = tmp_path_factory.mktemp(request.param)
    with scripted(folder, template, specials, eos, plain=request.param == "qwen_added") as server:
        server.runner.free = True
        yield server, thought


def grammar_of(server: Scripted, grammar: Grammar, use: ToolUse | None = None, **variables: Any) -> Grammar:
    """The grammar of a reply to a question."""
    state = server.service.state
    prompt = server.tokenizer.encode_chat([ASK], variables=variables)
    found = with_tool_grammar(state, use or ToolUse(), SamplingParams(grammar=grammar), prompt).grammar
    assert found is not None
    return found


class Follower:
    """Follows a reply through a grammar, token by token."""

    def __init__(self, tokenizer: Tokenizer, grammar: Grammar) -> None:
        (end,) = (tokenizer.encode(tokenizer.special_tokens["eos_token"], add_special_tokens=False),)
        self.tokenizer, self.end = tokenizer, end[0]
        grammars = Grammars(tokenizer.vocab_size, end)
        grammars.use_tokenizer(tokenizer.serialized)
        found = grammars.constraint(SamplingParams(grammar=grammar))
        assert found is not None
        self.constraint = found
        self.constraint.compute()

    def goes(self, text: str) -> bool:
        """Can the reply go on with this text?"""
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if self.constraint.forbidden[token]:
                return False
            self.constraint.took([token])
            self.constraint.compute()
            assert self.constraint.error is None
        return True

    @property
    def may_end(self) -> bool:
        return not self.constraint.forbidden[self.end]


def test_the_grammar_begins_behind_the_reasoning(free: tuple[Scripted, str]) -> None:
    server, thought = free
    for kind, text in (
        ("json_schema", json.dumps(SCHEMA)),
        ("regex", r"\{\"n\": 1\}"),
        ("choice", json.dumps([ANSWER, "no"])),
        ("grammar", 'start: "{" /\\"n\\": [12]/ "}"'),
    ):
        grammar = grammar_of(server, Grammar(kind, text))  # type: ignore[arg-type]
        follower = Follower(server.tokenizer, grammar)
        for piece in (thought[:-12], thought[-12:], ANSWER[:-1]):
            assert follower.goes(piece), (kind, piece)
            assert not follower.may_end
        assert follower.goes("}")
        assert follower.may_end, kind
        assert not Follower(server.tokenizer, grammar).goes(thought + "x" + ANSWER)


def test_a_model_that_may_think_need_not(free: tuple[Scripted, str]) -> None:
    server, thought = free
    grammar = grammar_of(server, Grammar("json_schema", json.dumps(SCHEMA)))
    head = "<|channel|>final<|message|>" if "<|channel|>" in thought else ""
    begun = not thought.startswith(("<think>", "[THINK]", "<|channel|>"))
    follower = Follower(server.tokenizer, grammar)
    assert follower.goes(head + ANSWER)
    assert follower.may_end != begun, "reasoning that the prompt has begun must end first"


def test_without_thinking_the_grammar_begins_at_once(tmp_path: Path) -> None:
    with scripted(tmp_path, kit.QWEN) as server:
        asked = Grammar("json_schema", json.dumps(SCHEMA))
        assert grammar_of(server, asked, enable_thinking=False) == asked
        assert grammar_of(server, asked).before


def test_replies_of_random_weights_think_and_follow_the_schema(free: tuple[Scripted, str]) -> None:
    server, _ = free
    skip_without_marks(server)
    thoughts = 0
    for seed in range(4):
        choice = ask(server, seed, response_format=FORM)
        assert choice.finish_reason == "stop"
        found = json.loads(choice.message.content)
        assert found["n"] in (1, 2)
        assert found.get("s", "a") in ("a", "b")
        thoughts += bool(getattr(choice.message, "reasoning_content", ""))
    assert thoughts > 0


def test_forced_calls_follow_reasoning(free: tuple[Scripted, str]) -> None:
    server, _ = free
    skip_without_marks(server)
    thoughts = 0
    for seed in range(3):
        choice = ask(server, seed, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        assert choice.finish_reason == "tool_calls"
        assert json.loads(choice.message.tool_calls[0].function.arguments)["n"] in (1, 2)
        thoughts += bool(getattr(choice.message, "reasoning_content", ""))
    assert thoughts > 0


def skip_without_marks(server: Scripted) -> None:
    """Skip where marks are written in several tokens: random weights never write them."""
    if len(server.tokenizer.encode("</think>")) > 1 and server.service.state.reasoning.name == "think":  # type: ignore[union-attr]
        pytest.skip("random weights never end this reasoning")


def ask(server: Scripted, seed: int, **fields: Any) -> Any:
    """Ask a model that likes to begin reasoning, and to end it."""
    tokenizer = server.tokenizer
    likings = {"<think>": 9, "[THINK]": 9, "</think>": 6, "[/THINK]": 6, "<|end|>": 6}
    ids = {mark: tokenizer.encode(mark, add_special_tokens=False) for mark in likings}
    bias = {str(found[0]): likings[mark] for mark, found in ids.items() if len(found) == 1}
    return server.client.chat.completions.create(
        model="model", messages=[ASK], temperature=1, seed=seed, max_tokens=3000, logit_bias=bias, **fields
    ).choices[0]
