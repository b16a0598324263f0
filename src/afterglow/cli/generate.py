"""`afterglow generate`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from afterglow.cli.command_options import GenerateOptions, SamplingOptions
from afterglow.cli.terminal import progress, read_text, summary
from afterglow.config import EngineConfig
from afterglow.errors import ConfigError, ModelError
from afterglow.library.language_model import load_model
from afterglow.library.locate import ABOUT_BUNDLED, BUNDLED, default_model, find_model
from afterglow.request import SamplingParams


def generate(
    model: str | None,
    config: EngineConfig,
    options: GenerateOptions,
    sampling: SamplingOptions,
) -> int:
    """Print the continuation of a text, and return the exit code. Raises: UserError."""
    if model is not None and options.prompt is None and options.file is None:
        _check_model(model)
    text = _read(options.prompt, options.file)
    if model is None and default_model() == BUNDLED and sys.stderr.isatty():
        print(f"[{ABOUT_BUNDLED}]", file=sys.stderr)
    params = SamplingParams(max_tokens=options.max_tokens, **{"temperature": 0.0, **sampling.given()})
    with progress() as report:
        local = load_model(model, config, progress=report)
    with local:
        if options.chat:
            reply = local.stream_chat([{"role": "user", "content": text}], params, stop=options.stop)
        else:
            reply = local.stream(text, params, stop=options.stop)
        for piece in reply:
            print(piece, end="", flush=True)
        print()
        if sys.stderr.isatty():
            print(f"[{summary(reply.prompt_tokens, reply.cached, reply.ttft_s)}]", file=sys.stderr)
    return 0


def _check_model(model: str) -> None:
    """Check the model before a text is read: the argument may be the text. Raises: ModelError."""
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
    text = read_text(file, "The text to go on with; Ctrl-D ends it:")
    return text if file is not None else text.removesuffix("\n")
