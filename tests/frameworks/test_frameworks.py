"""Frameworks that agents are written with, over HTTP: text, streams, loops of calls and results, objects, and errors.

A scripted model stands for one that calls tools, in each format of calls. What a grammar enforces is asked of `afterglow serve` on a
model that was not made for it. The `openai` package of the development environment is quick; all others are `long`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from afterglow.library.locate import BUNDLED, default_model
from tests.frameworks.environment import play, python_with_frameworks
from tests.scripted_model import scripted
from tests.server.process import serving
from tests.server.test_tools import FORMATS

HELLO, ANSWER = "Hello, my friend.", "Take an umbrella with you."
GREETING = ("chat", "stream")
BOTH = (*GREETING, "responses", "responses_stream")
MESSAGES = ("messages", "messages_stream")
LOOPS = ("tools", "responses_tools", "messages_tools")
OBJECTS = ("parse", "parse_by_call", "responses_parse", "responses_parse_by_call")
SCENES: dict[str, tuple[str, ...]] = {
    "openai": (
        *BOTH,
        "tools",
        "responses_tools",
        "parse",
        "required",
        "refused",
        "responses_parse",
        "responses_refused",
    ),
    "openai_agents": (*BOTH, "tools", "responses_tools", "parse", "refused", "responses_parse", "responses_refused"),
    "langchain_openai": (*BOTH, "tools", "responses_tools", *OBJECTS, "refused", "responses_refused"),
    "pydantic_ai": (*BOTH, "tools", "responses_tools", *OBJECTS, "refused", "responses_refused"),
    "instructor": ("parse", "parse_by_call", "parse_strictly", "messages_parse", "parts", "refused"),
    "litellm": (*GREETING, *MESSAGES, "responses", "tools", "messages_tools", "parse", "refused"),
    "anthropic": (*GREETING, "tools", "required", "malformed"),
}
CONSTRAINED = (
    *(*OBJECTS, "parse_strictly", "messages_parse", "parts", "required", "refused", "responses_refused", "malformed"),
)


def keys(framework: str) -> list[str]:
    """Name what is played: loops once for each format of calls, all others once."""
    scenes = SCENES[framework]
    return [scene for scene in scenes if scene not in LOOPS] + [
        f"{scene}@{name}" for scene in scenes if scene in LOOPS for name in FORMATS
    ]


Played = Callable[[str, bool], dict[str, Any]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """Plays all scenes of a framework, once: with the packages of this environment (`here`), or of their own."""
    with ExitStack() as stack:

        @cache
        def talking(name: str) -> tuple[str, str]:
            template, specials, eos, call = FORMATS[name]
            server = stack.enter_context(scripted(tmp_path_factory.mktemp(name), template, specials, eos))
            head = "<|channel|>final<|message|>" if name == "harmony" else ""

            def rule(prompt: str) -> str:
                if "umbrella" in prompt or "rain, 12" in prompt:
                    return head + ANSWER
                return call if "weather in" in prompt else head + HELLO

            server.answer(rule)
            return server.url, "model"

        @cache
        def serve(model: str) -> tuple[str, str]:
            return stack.enter_context(serving(tmp_path_factory.mktemp("serve"), model=model)).url, model

        @cache
        def all_scenes(framework: str, here: bool) -> dict[str, Any]:
            python = Path(sys.executable) if here else python_with_frameworks()
            scenes = {}
            for key in keys(framework):
                scene, _, name = key.partition("@")
                constrained = scene in CONSTRAINED
                server = serve(BUNDLED if here else default_model()) if constrained else talking(name or "hermes")
                scenes[key] = (scene, *server)
            return play(python, framework, scenes)

        yield all_scenes


CASES = [pytest.param("openai", key, True, id=f"openai-here-{key}") for key in keys("openai")] + [
    pytest.param(framework, key, False, id=f"{framework}-{key}", marks=[pytest.mark.long, pytest.mark.timeout(900)])
    for framework in SCENES
    for key in keys(framework)
]


@pytest.mark.parametrize(("framework", "key", "here"), CASES)
def test_it_works(played: Played, framework: str, key: str, here: bool) -> None:
    outcome = played(framework, here)[key]
    assert "error" not in outcome, outcome["error"]
    value, scene = outcome["value"], key.partition("@")[0]
    if scene.endswith("refused"):
        assert "properties.tags.uniqueItems" in value, "the path of what cannot be enforced"
        assert "'uniqueItems' cannot be enforced" in value
    elif scene == "malformed":
        assert "tools[0].input_schema.properties.tags.type" in value
    elif scene.endswith("stream"):
        assert "".join(value) == HELLO
        assert len(value) > 3
    elif scene in LOOPS:
        assert value == {"answer": ANSWER, "called": [{"city": "Köln", "days": 2}]}
    elif scene in CONSTRAINED:
        for kite in value if isinstance(value, list) else [value]:
            assert kite.keys() == {"colour", "sizes", "name"}
            assert kite["colour"] in ("red", "blue")
            assert len(kite["sizes"]) <= 3
    else:
        assert value == HELLO
