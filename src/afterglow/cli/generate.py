"""`afterglow generate`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afterglow.cli.environment import find_model, not_utf8, utf8_stdin
from afterglow.cli.local import open_local, summary
from afterglow.config import EngineConfig
from afterglow.errors import ConfigError, ModelError


def generate(
    model: str | None,
    config: EngineConfig,
    prompt: str | None,
    file: Path | None,
    max_tokens: int | None,
    sampling: dict[str, Any],
    stops: Sequence[str],
    chat: bool,
) -> int:
    if model is not None and prompt is None and file is None:
        _check_model(model)
    text = _read(prompt, file)
    with open_local(model, config) as local:
        if chat:
            ids = local.encode_chat([{"role": "user", "content": text}]).ids
        else:
            ids = local.tokenizer.encode(text)
        turn = local.turn(ids, max_tokens, sampling, stops)
        for piece in turn:
            print(piece, end="", flush=True)
        print()
        if sys.stderr.isatty():
            print(f"[{summary(turn.prompt_tokens, turn.cached, turn.ttft_s)}]", file=sys.stderr)
    return 0


def _check_model(model: str) -> None:
    """Before a text is waited for: the argument may be the text. Errors: ModelError."""
    try:
        find_model(model)
    except ModelError as error:
        raise ModelError(
            f"{error}; to go on with this text: afterglow generate --prompt {shlex.quote(model)}"
        ) from None


def _read(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ConfigError("give --prompt or --file, not both")
    if prompt is not None:
        return prompt
    if file is not None:
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from None
    if sys.stdin.isatty():
        print("The text to go on with; Ctrl-D ends it:", file=sys.stderr)
    try:
        return utf8_stdin().read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise not_utf8(error) from None
