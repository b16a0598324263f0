"""`instructor`, in its ways of asking for an object."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
import stage


def client(url: str, mode: instructor.Mode) -> Any:
    made = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(made, mode=mode)


def asked(model: str, form: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "A kite?"}]
    return {"model": model, "messages": messages, "response_model": form, "max_retries": 1, "max_tokens": 400}


def parse(mode: instructor.Mode) -> stage.Scene:
    return lambda url, model: client(url, mode).create(**asked(model, stage.Kite)).model_dump()


def messages_parse(url: str, model: str) -> Any:
    made = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    return instructor.from_anthropic(made).create(**asked(model, stage.Kite)).model_dump()


def parts(url: str, model: str) -> Any:
    """An object that is streamed, as far as it has arrived."""
    found = [*client(url, instructor.Mode.JSON_SCHEMA).create_partial(**asked(model, stage.Kite))]
    assert len(found) > 3
    return found[-1].model_dump()


def refused(url: str, model: str) -> str:
    mode = instructor.Mode.JSON_SCHEMA
    return stage.said(lambda: client(url, mode).create(**asked(model, stage.Tagged)))


stage.perform(
    {
        "parse": parse(instructor.Mode.JSON_SCHEMA),
        "parse_by_call": parse(instructor.Mode.TOOLS),
        "parse_strictly": parse(instructor.Mode.TOOLS_STRICT),
        "messages_parse": messages_parse,
        "parts": parts,
        "refused": refused,
    }
)
