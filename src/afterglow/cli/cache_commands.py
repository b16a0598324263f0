"""The subcommands of `afterglow cache`. Each imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afterglow.cli.command_options import CacheAccess, CacheFolder, CacheListing
from afterglow.cli.parameters import command
from afterglow.config import argument, option
from afterglow.errors import ConfigError

if TYPE_CHECKING:
    from afterglow.cli.server_client import ServerClient

cache_app = typer.Typer(
    help="Look at, verify and clear the disk tier, and the conversations of a running server. A server holds its "
    "namespace: stop it first to repair or clear.",
    no_args_is_help=True,
)

Conversations = Annotated[tuple[str, ...], argument(MISSING, "NAME", "Conversations, by their session_id.")]


@command(cache_app, "ls")
def ls(
    access: CacheListing,
    extents: Annotated[
        bool, option(False, "List extents on disk, also where a server could be asked.", names=("--extents",))
    ],
) -> int:
    """List namespaces (one per model). Of one: the conversations, if a server holds it, or else the extents."""
    from afterglow.cli import cache_disk

    return cache_disk.ls(access, extents)


@command(cache_app, "stats")
def stats(access: CacheListing) -> int:
    """Show how many tokens and bytes each namespace holds, how they are used, and what its server says."""
    from afterglow.cli import cache_disk

    return cache_disk.stats(access)


@command(cache_app, "pin")
def pin(names: Conversations, access: CacheAccess) -> int:
    """Keep conversations in the cache of a running server until they are unpinned."""
    return _each(names, partial(_server(access).pin, pinned=True), "pinned", access.json)


@command(cache_app, "unpin")
def unpin(names: Conversations, access: CacheAccess) -> int:
    """Let pinned conversations be evicted again."""
    return _each(names, partial(_server(access).pin, pinned=False), "not pinned any more", access.json)


@command(cache_app, "rm")
def rm(names: Conversations, access: CacheAccess) -> int:
    """Remove conversations from all tiers of a running server's cache."""
    return _each(names, _server(access).remove, "removed", access.json)


@command(cache_app, "register")
def register(
    name: Annotated[
        str, argument(MISSING, "NAME", "Call the prompt so; `default` goes before requests that bring none.")
    ],
    file: Annotated[Path, argument(MISSING, "FILE", "A file with the prompt, in UTF-8.")],
    access: CacheAccess,
) -> int:
    """Compute a system prompt on a running server, for the requests of one key, and keep it in all tiers."""
    from afterglow.cli.terminal_tables import print_json
    from afterglow.server.server_config import read_prompt

    text = read_prompt(file, "the file")
    server = _server(access)
    done = server.register(name, text)
    if access.json:
        print_json(done)
        return 0
    with server.understood():
        print(f"{name}: {done['tokens']} tokens, {done['prefilled_tokens']} computed now; kept in all tiers")
    return 0


@command(cache_app, "unregister")
def unregister(
    names: Annotated[tuple[str, ...], argument(MISSING, "NAME...", "System prompts, by their names.")],
    access: CacheAccess,
) -> int:
    """Keep registered system prompts no longer, nor put them before requests."""
    return _each(names, _server(access).unregister, "not registered any more", access.json)


@command(cache_app, "check")
def check(
    folder: CacheFolder,
    repair: Annotated[bool, option(False, "Drop damaged extents, and mend the catalog.", names=("--repair",))],
) -> int:
    """Verify every stored byte; exit code 1 if something is damaged and was not repaired, 2 if it is in use."""
    from afterglow.cli import cache_disk

    return cache_disk.check(folder, repair)


@command(cache_app, "clear")
def clear(
    folder: CacheFolder, yes: Annotated[bool, option(False, "Delete without asking.", names=("--yes", "-y"))]
) -> int:
    """Delete everything that is stored: cached KV, and the responses that clients could have gone on from."""
    from afterglow.cli import cache_disk

    return cache_disk.clear(folder, yes)


def _server(access: CacheAccess) -> ServerClient:
    """Make a client for the server that is asked. Raises: ConfigError."""
    from afterglow.cli.cache_disk import select
    from afterglow.cli.server_client import find_server

    return find_server([] if access.server is not None else select(access.cache_dir, access.namespace), access)


def _each(names: tuple[str, ...], ask: Callable[[str], dict[str, Any]], done: str, as_json: bool) -> int:
    """Call `ask` for each name; return 1 if that failed for any name."""
    from afterglow.cli.terminal_tables import print_json

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
