"""The bundled model's one ability: it knows what it was told, also behind long texts."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from afterglow import CacheConfig, EngineConfig, SamplingParams, load_model
from afterglow.errors import ModelError
from afterglow.library.locate import BUNDLED, find_model

CONFIG = EngineConfig(cache=CacheConfig(device_cache=2**27, host_cache=2**26, disk_cache=0), threads=1)


def test_it_knows_what_it_was_told() -> None:
    try:
        find_model(BUNDLED)
    except ModelError as error:
        pytest.skip(str(error))
    script = json.loads((files("afterglow") / "assets" / "demo_conversation.json").read_text("utf-8"))
    messages = [{"role": "system", "content": script["system"]}]
    with load_model(BUNDLED, CONFIG) as model:
        for text in script["turns"]:
            messages.append({"role": "user", "content": text})
            reply = model.chat(messages, SamplingParams(max_tokens=48, temperature=0))
            messages.append({"role": "assistant", "content": reply.text})
    replies = [message["content"] for message in messages if message["role"] == "assistant"]
    for turn, value in script["expected"].items():
        assert value.lower() in replies[int(turn)].lower()
