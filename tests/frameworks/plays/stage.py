"""What every play is about, and how it tells what happened. Runs in an environment of its own, without the package under test."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

HELLO = "Say hello."
QUESTION = "What is the weather in Köln?"
RESULT = "rain, 12 degrees"

Scene = Callable[[str, str], Any]  # (base URL, model)


class Kite(BaseModel):
    """A kite for sale. It has no other properties: a small model would think of many."""

    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "blue"]
    sizes: list[int] = Field(max_length=3)
    name: str = Field(max_length=12)


class Tagged(BaseModel):
    """Something with a set, which no grammar can enforce."""

    tags: set[str]


def weather(city: str, days: int = 1) -> str:
    """Tells the weather.

    Args:
        city: Where.
        days: How many days ahead.
    """
    _called.append({"city": city, "days": days})
    return RESULT


_called: list[dict[str, Any]] = []


def called() -> list[dict[str, Any]]:
    """Return the arguments of all calls of `weather` since the last time."""
    found = [*_called]
    _called.clear()
    return found


TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}


def perform(scenes: dict[str, Scene]) -> None:
    """Play what the command line asks for, as JSON: {key: [scene, base URL, model]}. Prints {key: {"value" or "error": ...}}."""
    found: dict[str, Any] = {}
    for key, (scene, url, model) in json.loads(sys.argv[1]).items():
        if scene not in scenes:
            continue
        try:
            found[key] = {"value": scenes[scene](url, model)}
        except Exception:
            found[key] = {"error": traceback.format_exc()}
    print(json.dumps(found))


def said(play: Callable[[], object]) -> str:
    """Return what the framework says about a request that the server refuses."""
    try:
        result = play()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"it was not refused: {result!r}")
