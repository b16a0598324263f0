"""The subcommands of `afterglow cache`. Each imports what it needs when it runs."""

from __future__ import annotations

import typer

from afterglow.cli.command_options import (
    CacheAccess,
    CacheFolder,
    CacheListing,
    CheckOptions,
    ClearOptions,
    ConversationNames,
    ListOptions,
    NewPrompt,
    PromptNames,
)
from afterglow.cli.parameters import command

cache_app = typer.Typer(
    help="Look at, verify and clear the disk tier, and the conversations of a running server. A server holds its "
    "namespace: stop it first to repair or clear.",
    no_args_is_help=True,
)


@command(cache_app, "ls")
def ls(access: CacheListing, options: ListOptions) -> int:
    """List namespaces (one per model). Of one: the conversations, if a server holds it, or else the extents."""
    from afterglow.cli import cache_disk

    return cache_disk.ls(access, options.extents)


@command(cache_app, "stats")
def stats(access: CacheListing) -> int:
    """Show how many tokens and bytes each namespace holds, how they are used, and what its server says."""
    from afterglow.cli import cache_disk

    return cache_disk.stats(access)


@command(cache_app, "pin")
def pin(conversations: ConversationNames, access: CacheAccess) -> int:
    """Keep conversations in the cache of a running server until they are unpinned."""
    from afterglow.cli import cache_server

    return cache_server.pin(conversations.names, True, access)


@command(cache_app, "unpin")
def unpin(conversations: ConversationNames, access: CacheAccess) -> int:
    """Let pinned conversations be evicted again."""
    from afterglow.cli import cache_server

    return cache_server.pin(conversations.names, False, access)


@command(cache_app, "rm")
def rm(conversations: ConversationNames, access: CacheAccess) -> int:
    """Remove conversations from all tiers of a running server's cache."""
    from afterglow.cli import cache_server

    return cache_server.remove(conversations.names, access)


@command(cache_app, "register")
def register(prompt: NewPrompt, access: CacheAccess) -> int:
    """Compute a system prompt on a running server, for the requests of one key, and keep it in all tiers."""
    from afterglow.cli import cache_server

    return cache_server.register(prompt.name, prompt.file, access)


@command(cache_app, "unregister")
def unregister(prompts: PromptNames, access: CacheAccess) -> int:
    """Keep registered system prompts no longer, nor put them before requests."""
    from afterglow.cli import cache_server

    return cache_server.unregister(prompts.names, access)


@command(cache_app, "check")
def check(folder: CacheFolder, options: CheckOptions) -> int:
    """Verify every stored byte; exit code 1 if something is damaged and was not repaired, 2 if it is in use."""
    from afterglow.cli import cache_disk

    return cache_disk.check(folder, options.repair)


@command(cache_app, "clear")
def clear(folder: CacheFolder, options: ClearOptions) -> int:
    """Delete everything that is stored: cached KV, and the responses that clients could have gone on from."""
    from afterglow.cli import cache_disk

    return cache_disk.clear(folder, options.yes)
