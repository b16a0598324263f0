"""How a sequence's states become one vector, and what a model directory says about it (sentence-transformers' files)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.errors import ModelError

Mode = Literal["mean", "cls", "last"]

_MODES: dict[str, Mode] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_FLAGS: dict[str, Mode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_STEPS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    """Which states count. `max_tokens`: longest input that the model's author meant it for, if he says so.
    `declared`: its directory says how to embed with it, so that texts need no prompt around them."""

    mode: Mode
    max_tokens: int | None = None
    declared: bool = False

    @classmethod
    def read(cls, folder: Path, *, causal: bool) -> Pooling:
        """As `modules.json` and what it names say; without it the last state of a decoder, the mean of an encoder's.

        Raises: ModelError for what would give other vectors than the model's author meant, by name.
        """
        if not (folder / "modules.json").is_file():
            return cls("last" if causal else "mean")
        steps = _read_json(folder / "modules.json")
        if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
            raise ModelError(f"{folder / 'modules.json'} must hold a list of modules")
        mode: Mode = "mean"
        for step in steps:
            kind = str(step.get("type")).rpartition(".")[2]
            if kind not in _STEPS:
                raise ModelError(
                    f"{folder / 'modules.json'} has a {kind} module, and only {', '.join(_STEPS)} are known"
                )
            if kind == "Pooling":
                mode = _mode(folder / str(step.get("path")) / "config.json")
        limit = None
        if (folder / "sentence_bert_config.json").is_file():
            about = _read_json(folder / "sentence_bert_config.json")
            limit = about.get("max_seq_length") if isinstance(about, dict) else None
            if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
                raise ModelError(
                    f"max_seq_length in {folder / 'sentence_bert_config.json'} must be a number of tokens, not {limit!r}"
                )
        return cls(mode, limit, declared=True)

    def __call__(self, states: Tensor, runs: list[tuple[int, int]]) -> Tensor:
        """`states` [tokens, hidden] of a flat batch whose neighbours of equal length are `runs` (count, length) ->
        unit vectors, float32 [sequences, hidden]."""
        parts, start = [], 0
        for count, length in runs:
            rows = states[start : start + count * length].view(count, length, -1)
            if self.mode == "mean":
                parts.append(rows.float().mean(1))
            else:
                parts.append(rows[:, 0 if self.mode == "cls" else -1].float())
            start += count * length
        return F.normalize(torch.cat(parts), dim=-1)


def _mode(path: Path) -> Mode:
    config = _read_json(path)
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object")
    if config.get("include_prompt") is False:
        raise ModelError(f"{path} asks to leave the prompt out of the mean, which is not supported")
    named = config.get("pooling_mode")
    if named is not None:
        wanted = [named] if isinstance(named, str) else list(named)
        unknown = [name for name in wanted if name not in _MODES]
        modes = [_MODES[name] for name in wanted if name in _MODES]
    else:
        wanted = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
        unknown = [key for key in wanted if key not in _FLAGS]
        modes = [_FLAGS[key] for key in wanted if key in _FLAGS]
    if unknown or len(modes) != 1:
        raise ModelError(
            f"{path} asks for pooling {', '.join(map(str, wanted)) or 'of no kind'}; supported is one of "
            f"{', '.join(_MODES)}"
        )
    return modes[0]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error})") from None
