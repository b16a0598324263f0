"""`afterglow cache` through a running server: conversations and system prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from afterglow.cli.cache_disk import select
from afterglow.cli.command_options import CacheAccess
from afterglow.cli.server_client import ServerClient, find_server
from afterglow.cli.terminal_tables import print_json
from afterglow.errors import ConfigError
from afterglow.server.server_config import read_prompt


def pin(names: Sequence[str], pinned: bool, access: CacheAccess) -> int:
    """Pin or unpin conversations. Returns 1 if that failed for any name. Raises: ConfigError."""
    server = _server(access)
    done = "pinned" if pinned else "not pinned any more"
    return _each(names, lambda name: server.pin(name, pinned), done, access.as_json)


def remove(names: Sequence[str], access: CacheAccess) -> int:
    """Remove conversations. Returns 1 if that failed for any name. Raises: ConfigError."""
    return _each(names, _server(access).remove, "removed", access.as_json)


def register(name: str, file: Path, access: CacheAccess) -> int:
    """Register a system prompt, and return the exit code. Raises: ConfigError, also for a file that is not text."""
    text = read_prompt(file, "the file")
    done = _server(access).register(name, text)
    if access.as_json:
        print_json(done)
    else:
        print(f"{name}: {done['tokens']} tokens, {done['prefilled_tokens']} computed now; kept in all tiers")
    return 0


def unregister(names: Sequence[str], access: CacheAccess) -> int:
    """Unregister system prompts. Returns 1 if that failed for any name. Raises: ConfigError."""
    return _each(names, _server(access).unregister, "not registered any more", access.as_json)


def _server(access: CacheAccess) -> ServerClient:
    return find_server([] if access.server is not None else select(access.cache_dir, access.namespace), access)


def _each(names: Sequence[str], ask: Callable[[str], dict[str, Any]], done: str, as_json: bool) -> int:
    """Call `ask` for each name; return 1 if that failed for any name."""
    answers, failed = [], False
    for name in names:
        try:
            answers.append(ask(name))
            if not as_json:
                print(f"{name}: {done}")
        except ConfigError as error:
            failed = True
            answers.append({"name": name, "error": str(error)})
            print(f"{name}: {error}", file=sys.stderr)
    if as_json:
        print_json(answers)
    return 1 if failed else 0
