"""Sampling parameters of requests that leave them out: those that the model's author recommends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afterglow.errors import ModelError, RequestError
from afterglow.gguf_file import is_gguf, read_metadata
from afterglow.request import SamplingParams

_NEUTRAL = {"length_penalty": 1, "min_new_tokens": 0}  # settings that are not honoured
_IN_GGUF = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_CALM = {"temperature": 0.7, "top_p": 0.9}
# What the cards of models recommend whose files say nothing, by `general.basename`.
_ON_CARDS = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters that a model brings, else OpenAI's defaults. `stated` names those that the model brings."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    ignored: tuple[str, ...] = ()  # settings of the model's author that are not honoured
    stated: frozenset[str] = frozenset()
    greedy: bool = False  # the author says that tokens are not to be drawn, and names no temperature

    @classmethod
    def read(cls, model: Path) -> SamplingDefaults:
        """Read the defaults of a model directory (`generation_config.json`) or of a GGUF file (`general.sampling.*`).

        Raises: ModelError.
        """
        source, config = _gguf_settings(model) if is_gguf(model) else _directory_settings(model)
        names = (*_IN_GGUF, "max_new_tokens")
        found = {name: config[name] for name in names if config.get(name) is not None}
        ignored = tuple(
            f"{name}={config[name]}"
            for name, neutral in _NEUTRAL.items()
            if config.get(name) is not None and config[name] != neutral
        )
        try:
            SamplingParams(**{k: v for k, v in found.items() if k != "max_new_tokens"})
        except (RequestError, TypeError) as error:
            raise ModelError(f"{source}: {error}") from None
        greedy = config.get("do_sample") is False and "temperature" not in found
        return cls(**found, ignored=ignored, stated=frozenset(found), greedy=greedy)

    def for_a_chat(self) -> dict[str, Any]:
        """Return the temperature and the filters for a conversation in a terminal, by their names in `SamplingParams`.

        Where a model brings none, they are lower than OpenAI's: small models lose the thread at a temperature of 1.
        """
        found = {name: getattr(self, name) for name in _IN_GGUF}
        if self.greedy:
            return found | {"temperature": 0.0}
        return found if self.stated & {"temperature", "top_p", "top_k", "min_p"} else found | _CALM


def _directory_settings(model: Path) -> tuple[Path, Mapping[str, Any]]:
    path = model / "generation_config.json"
    if not path.is_file():
        return path, {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise ModelError(f"{path} is not a JSON object")
    return path, config


def _gguf_settings(model: Path) -> tuple[Path, Mapping[str, Any]]:
    metadata = read_metadata(model)
    found = {name: metadata[key] for name, key in _IN_GGUF.items() if key in metadata}
    return model, found or _ON_CARDS.get(str(metadata.get("general.basename")).lower(), {})
