"""Sampling parameters of requests that leave them out: those that the model's author recommends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from afterglow.errors import ModelError, RequestError
from afterglow.request import SamplingParams

_NEUTRAL = {"length_penalty": 1, "min_new_tokens": 0}  # settings that are not honoured


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters from the model's `generation_config.json`, else OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    ignored: tuple[str, ...] = ()  # settings of the model's author that are not honoured

    @classmethod
    def read(cls, model_dir: Path) -> SamplingDefaults:
        """Read the defaults of a model. Raises: ModelError."""
        path = model_dir / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            config = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(config, Mapping):
            raise ModelError(f"{path} is not a JSON object")
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
        found = {name: config[name] for name in names if config.get(name) is not None}
        ignored = tuple(
            f"{name}={config[name]}"
            for name, neutral in _NEUTRAL.items()
            if config.get(name) is not None and config[name] != neutral
        )
        try:
            SamplingParams(**{k: v for k, v in found.items() if k != "max_new_tokens"})
        except (RequestError, TypeError) as error:
            raise ModelError(f"{path}: {error}") from None
        return cls(**found, ignored=ignored)
