"""System prompts in files. Light to import."""

from __future__ import annotations

from pathlib import Path

from afterglow.errors import ConfigError


def read_prompt(path: Path, what: str = "--system-prompt-file") -> str:
    """Read a system prompt from a file, without the white space around it. Raises: ConfigError, which names `what`."""
    try:
        text = path.read_bytes().decode("utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise ConfigError(f"{what} {path} is not UTF-8: byte {error.start} is 0x{bad:02x}; save it as UTF-8") from None
    if not text:
        raise ConfigError(f"{what} {path} is empty; write a prompt into it, or leave it out")
    return text
