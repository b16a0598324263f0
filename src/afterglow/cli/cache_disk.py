"""`afterglow cache` for the disk tier: list, measure, verify and clear namespaces."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from afterglow.cli.command_options import CacheFolder, CacheListing
from afterglow.cli.server_client import ServerClient, server_of
from afterglow.cli.terminal import progress
from afterglow.cli.terminal_tables import NOTHING, lines, nested, print_json, table
from afterglow.config import default_cache_dir, format_size
from afterglow.errors import ConfigError, StoreError
from afterglow.plan.step import ExtentRecord
from afterglow.server.lifecycle.address import address_of
from afterglow.store import admin
from afterglow.store.admin import NamespaceInfo
from afterglow.store.database import conversations
from afterglow.store.namespace.namespace import CATALOG, DESCRIPTION, EXTENTS, LOCK, Namespace, locked
from afterglow.store.places import bytes_below
from afterglow.store.places import remove as remove_path
from afterglow.store.shared import notices

# What a namespace holds, with SQLite's files beside it, and what was being written or was set aside.
_OWN = re.compile(
    rf"\.tmp-.+|({'|'.join(map(re.escape, (DESCRIPTION, LOCK, CATALOG, EXTENTS, conversations.FILE, notices.FILE)))})"
    r"(\.new|\.damaged|-wal|-shm|-journal)*"
)


def ls(access: CacheListing, extents: bool) -> int:
    """List namespaces; of one, or of a server, the conversations; the extents where no server can be asked."""
    if access.server is not None:
        return _conversations(ServerClient(access.server, access), access.json)
    found = select(access.cache_dir, access.namespace)
    if access.namespace is None and not extents:
        if access.json:
            print_json([_facts(info) for info in found])
        else:
            _show(("namespace", "extents", "tokens", "size", "last used", "held by"), [*map(_row, found)])
            _say_problems(found)
        return 0
    if found and found[0].holder is not None and not extents:
        try:
            return _conversations(server_of(found[0], access), access.json)
        except ConfigError as error:
            print(f"afterglow: {error}; these are the extents on disk:", file=sys.stderr)
    records = [record for info in found for record in admin.list_extents(info.path)]
    prompts = {extent: name for info in found for extent, name in admin.registered_prompts(info.path).items()}
    if access.json:
        print_json([_extent_facts(record, prompts.get(record.id)) for record in records])
    else:
        heads = ("extent", "after", "kind", "tokens", "size", "hits", "last used", "pinned")
        _show(heads, [_extent_row(record, prompts.get(record.id)) for record in records])
    return 0


def _show(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        table(heads, rows)
    else:
        print(NOTHING)


def _extent_facts(record: ExtentRecord, prompt: str | None) -> dict[str, Any]:
    return {
        "id": record.id,
        "parent": record.parent,
        "parent_tokens": record.parent_rows,
        "kind": record.kind,
        "tokens": record.rows,
        "bytes": record.file_bytes,
        "last_used": record.last_used,
        "hits": record.hits,
        "system_prompt": prompt,
    }


def _extent_row(record: ExtentRecord, prompt: str | None) -> tuple[str, ...]:
    after = f"{record.parent[:8]}+{record.parent_rows}" if record.parent else "-"
    sizes = (str(record.rows), format_size(record.file_bytes), str(record.hits))
    pinned = "-" if prompt is None else f"system prompt {prompt}"
    return (record.id[:16], after, record.kind, *sizes, _ago(record.last_used), pinned)


def _conversations(server: ServerClient, as_json: bool) -> int:
    sessions, prompts = server.sessions(), server.prompts()
    if as_json:
        print_json([*prompts, *sessions])
        return 0
    with server.understood():
        shown = [
            (
                prompt["name"],
                *_sizes(prompt),
                *("-", "never", "system prompt of all tenants" if prompt["shared"] else "system prompt"),
            )
            for prompt in prompts
        ]
        shown += [
            (
                session["name"],
                *_sizes(session),
                _ago(session["last_used"]),
                "never" if session["expires"] is None else _until(session["expires"]),
                "yes" if session["pinned"] else "-",
            )
            for session in sessions
        ]
    _show(("conversation", "tokens", "device", "host", "disk", "last used", "expires", "pinned"), shown)
    return 0


def _sizes(card: Mapping[str, Any]) -> tuple[str, ...]:
    tiers = (str(card["cached_tokens"][tier]) for tier in ("device", "host", "disk"))
    return (str(card["tokens"]), *tiers)


def stats(access: CacheListing) -> int:
    """Show the contents of the disk, and the statistics of each server that holds a namespace."""
    if access.server is not None:
        said = ServerClient(access.server, access).stats()
        if access.json:
            print_json(said)
        else:
            lines(nested(said))
        return 0
    reports = []
    for info in select(access.cache_dir, access.namespace):
        facts, live = _facts(info), None
        if info.holder is not None:
            try:
                live = server_of(info, access).stats()
            except ConfigError as error:
                print(f"afterglow: {error}; these are the figures of the disk", file=sys.stderr)
        reports.append({**facts, "server": live})
        if not access.json:
            shown = facts | {"bytes": format_size(info.bytes), "last_used": _ago(info.last_used)}
            print(shown.pop("namespace"))
            lines(nested(shown, "  "))
            if live is not None:
                print("  its server, for this key")
                lines(nested(live, "    "))
    if access.json:
        print_json(reports)
    elif not reports:
        print(NOTHING)
    elif len(reports) > 1:
        total = format_size(sum(report["bytes"] for report in reports))
        print(
            f"together {total}; --disk-cache is for each namespace, and `afterglow cache clear NAMESPACE` removes one"
        )
    return 0


def check(folder: CacheFolder, repair: bool) -> int:
    """Verify namespaces; return 1 if one is damaged and was not repaired, 2 if that was because a process holds it."""
    reports = []
    failed = busy = False
    for info in select(folder.cache_dir, folder.namespace):
        with progress() as report:
            try:
                counted = partial(report, f"Checking {info.path.name}")
                result = admin.check(info.path, repair=repair, progress=counted)
            except (ConfigError, StoreError, OSError) as error:
                failed, busy = True, busy or (repair and info.holder is not None)
                reports.append({"namespace": info.path.name, "ok": False, "error": str(error)})
                if not folder.json:
                    print(f"{info.path.name}: {error}")
                continue
        failed |= not result.ok
        reports.append(
            {
                "namespace": info.path.name,
                "ok": result.ok,
                "repaired": result.repaired,
                "extents": result.extents,
                "bytes": result.bytes,
                "problems": [asdict(problem) for problem in result.problems],
            }
        )
        if not folder.json:
            for problem in result.problems:
                print(f"{info.path.name}: {problem.kind} {problem.name}: {problem.detail}")
            count = len(result.problems)
            verdict = f"{count} problem{'s' if count > 1 else ''}" if count else "sound"
            if count:
                verdict += ", all repaired" if result.repaired else "; --repair mends them"
            print(f"{info.path.name}: {result.extents} extents, {format_size(result.bytes)}: {verdict}")
    if folder.json:
        print_json(reports)
    elif not reports:
        print(NOTHING)
    return 2 if busy else 1 if failed else 0


def clear(folder: CacheFolder, yes: bool) -> int:
    """Empty namespaces, and return the exit code. Raises: ConfigError, before anything is deleted, if a process holds one, or one
    holds what no cache writes; StoreError."""
    found = select(folder.cache_dir, folder.namespace)
    _refuse(found)
    total = sum(info.bytes for info in found)
    if found and not yes:
        if not sys.stdin.isatty():
            raise ConfigError("cache clear asks before it deletes; say --yes where standard input is no terminal")
        names = ", ".join(info.path.name + ("" if info.description else ", which cannot be read") for info in found)
        answer = input(f"Delete {format_size(total)} of cached KV ({names})? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return 1
    done: list[dict[str, Any]] = []
    try:
        for info in found:
            done.append({"namespace": info.path.name, "bytes_freed": _clear(info)})
            if not folder.json:
                print(f"{info.path.name}: {format_size(done[-1]['bytes_freed'])} freed")
    finally:
        if folder.json:
            print_json(done)
    if not found and not folder.json:
        print("there was nothing to delete")
    return 0


def _refuse(found: Sequence[NamespaceInfo]) -> None:
    """Refuse to clear what a process holds, or what may not be a namespace. Raises: ConfigError."""
    for info in found:
        if info.holder is not None:
            raise ConfigError(
                f"{info.path} is in use by {info.holder}, and nothing was deleted; stop that process, or name another namespace"
            )
    for info in found:
        # A description that cannot be read may be a file of that name that belongs to another program.
        if info.description is None and (strange := [entry.name for entry in _entries(info.path, own=False)]):
            raise ConfigError(
                f"{info.path} holds {', '.join(sorted(strange))}, which this version does not know, and nothing was deleted; "
                "if the folder is a cache's, delete it yourself"
            )


def _clear(info: NamespaceInfo) -> int:
    """Remove the extents and the texts of stored responses; return the bytes freed. Raises: ConfigError, if a process
    holds the namespace; StoreError."""
    before = bytes_below(info.path)
    try:
        if info.description is None:
            _empty(info.path)
        else:
            admin.clear(info.path)
            with Namespace.open_existing(info.path):
                conversations.erase(info.path)
    except OSError as error:
        raise StoreError(f"cannot clear {info.path}: {error.strerror}") from error
    return max(0, before - bytes_below(info.path))


def _empty(path: Path) -> None:
    """Remove what a namespace of another version, or with a damaged description, is known to hold. Raises: ConfigError, OSError."""
    with locked(path):
        # The description last: with it the rest is still found if this ends half-way. The lock's file stays: a process
        # that waits for the lock must not hold another file of that name.
        for entry in sorted(_entries(path, own=True), key=lambda entry: entry.name == DESCRIPTION):
            if entry.name != LOCK:
                remove_path(entry)


def _entries(path: Path, own: bool) -> list[Path]:
    """List the entries of a folder that have names of a namespace's, or those that have not. Raises: ConfigError."""
    try:
        return [entry for entry in path.iterdir() if (_OWN.fullmatch(entry.name) is not None) == own]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def select(cache_dir: Path | None, namespace: str | None) -> Sequence[NamespaceInfo]:
    """List all namespaces, or the one whose name begins with `namespace`. Raises: ConfigError."""
    folder = cache_dir or default_cache_dir()
    found = admin.list_namespaces(folder, _left_out)
    if cache_dir is not None and not found and not cache_dir.is_dir():
        raise ConfigError(f"there is no cache directory {cache_dir}")
    if namespace is None:
        return found
    fitting = [info for info in found if info.path.name.startswith(namespace)]
    exact = [info for info in fitting if info.path.name == namespace]
    if len(exact or fitting) != 1:
        names = ", ".join(info.path.name for info in (fitting or found)) or "none"
        what = "no namespace is" if not fitting else "several namespaces are"
        raise ConfigError(f"{what} called {namespace!r} in {folder}; there are: {names}")
    return exact or fitting


def _left_out(path: Path, error: OSError) -> None:
    print(f"afterglow: {path} is left out, for it cannot be looked at: {error.strerror}", file=sys.stderr)


def _facts(info: NamespaceInfo) -> dict[str, Any]:
    return {
        "namespace": info.path.name,
        "path": str(info.path),
        "model": info.description.name if info.description else None,
        "digest": info.description.digest if info.description else None,
        "extents": info.extents,
        "tokens": info.rows,
        "hits": info.hits,
        "bytes": info.bytes,
        "last_used": info.last_used,
        "held_by": str(info.holder) if info.holder else None,
        "listens_at": address_of(info.path),
        "problem": info.problem,
    }


def _row(info: NamespaceInfo) -> tuple[str, ...]:
    holder = f"pid {info.holder.pid}" if info.holder else "-"
    if url := address_of(info.path):
        holder += f" at {url}"
    sizes = (str(info.extents), str(info.rows), format_size(info.bytes))
    return (info.path.name, *sizes, _ago(info.last_used), holder)


def _say_problems(found: Sequence[NamespaceInfo]) -> None:
    for info in found:
        if info.problem:
            print(f"{info.path.name}: {info.problem}", file=sys.stderr)


def _ago(moment: float | None) -> str:
    """Write how long ago a moment was."""
    if moment is None:
        return "never"
    seconds = max(0.0, time.time() - moment)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _until(moment: float) -> str:
    """Write how far in the future a moment is."""
    return f"in {_ago(2 * time.time() - moment).removesuffix(' ago')}" if moment > time.time() else "now"
