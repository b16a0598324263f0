"""`afterglow cache`: what the disk tier holds, whether it is sound, and getting rid of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from afterglow.cli.progress import progress
from afterglow.cli.remote import Access, Server, find_server, server_of
from afterglow.config import default_cache_dir, format_size
from afterglow.errors import ConfigError, StoreError
from afterglow.server.presence import address_of
from afterglow.server.promptfile import read_prompt
from afterglow.store import admin, conversations
from afterglow.store.admin import NamespaceInfo
from afterglow.store.namespace import DESCRIPTION, LOCK, Namespace, locked
from afterglow.store.places import bytes_below
from afterglow.store.places import remove as remove_path

NOTHING = "nothing is stored"


def ls(cache_dir: Path | None, namespace: str | None, extents: bool, access: Access, as_json: bool) -> int:
    """Namespaces; of one, or of a server, the conversations; the extents where no server can be asked."""
    if access.server is not None:
        return _conversations(Server(access.server, access), as_json)
    found = _select(cache_dir, namespace)
    if namespace is None and not extents:
        if as_json:
            _print_json([_facts(info) for info in found])
        else:
            _table(("namespace", "extents", "tokens", "size", "last used", "held by"), map(_row, found))
            _say_problems(found)
        return 0
    if found and found[0].holder is not None and not extents:
        try:
            return _conversations(server_of(found[0], access), as_json)
        except ConfigError as error:
            print(f"afterglow: {error}; these are the extents on disk:", file=sys.stderr)
    records = [record for info in found for record in admin.list_extents(info.path)]
    prompts = {extent: name for info in found for extent, name in admin.registered_prompts(info.path).items()}
    if as_json:
        _print_json(
            [
                {
                    "id": r.id,
                    "parent": r.parent,
                    "parent_tokens": r.parent_rows,
                    "kind": r.kind,
                    "tokens": r.rows,
                    "bytes": r.file_bytes,
                    "last_used": r.last_used,
                    "hits": r.hits,
                    "system_prompt": prompts.get(r.id),
                }
                for r in records
            ]
        )
    else:
        _table(
            ("extent", "after", "kind", "tokens", "size", "hits", "last used", "pinned"),
            (
                (
                    r.id[:16],
                    f"{r.parent[:8]}+{r.parent_rows}" if r.parent else "-",
                    r.kind,
                    str(r.rows),
                    format_size(r.file_bytes),
                    str(r.hits),
                    _ago(r.last_used),
                    f"system prompt {prompts[r.id]}" if r.id in prompts else "-",
                )
                for r in records
            ),
        )
    return 0


def _conversations(server: Server, as_json: bool) -> int:
    sessions, prompts = server.sessions(), server.prompts()
    if as_json:
        _print_json([*prompts, *sessions])
        return 0
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
    _table(("conversation", "tokens", "device", "host", "disk", "last used", "expires", "pinned"), shown)
    return 0


def _sizes(card: Mapping[str, Any]) -> tuple[str, ...]:
    tiers = (str(card["cached_tokens"][tier]) for tier in ("device", "host", "disk"))
    return (str(card["tokens"]), *tiers)


def stats(cache_dir: Path | None, namespace: str | None, access: Access, as_json: bool) -> int:
    """What is on disk, and what each server that holds a part of it says."""
    if access.server is not None:
        said = Server(access.server, access).stats()
        if as_json:
            _print_json(said)
        else:
            _lines(said)
        return 0
    reports = []
    for info in _select(cache_dir, namespace):
        facts, live = _facts(info), None
        if info.holder is not None:
            try:
                live = server_of(info, access).stats()
            except ConfigError as error:
                print(f"afterglow: {error}; this is what is on disk", file=sys.stderr)
        reports.append({**facts, "server": live})
        if not as_json:
            print(facts.pop("namespace"))
            for name, value in facts.items():
                if name == "bytes":
                    value = format_size(value)
                elif name == "last_used":
                    value = _ago(value)
                if value is not None:
                    print(f"  {name.replace('_', ' '):14} {value}")
            if live is not None:
                print("  its server, for this key")
                _lines(live, "    ")
    if as_json:
        _print_json(reports)
    elif not reports:
        print(NOTHING)
    elif len(reports) > 1:
        total = format_size(sum(report["bytes"] for report in reports))
        print(f"together {total}; --disk-cache is for each of them, and `afterglow cache clear NAMESPACE` removes one")
    return 0


def pin(
    cache_dir: Path | None, namespace: str | None, names: Sequence[str], pinned: bool, access: Access, as_json: bool
) -> int:
    server = find_server(_namespaces(cache_dir, namespace, access), access)
    return _each(names, lambda name: server.pin(name, pinned), "pinned" if pinned else "not pinned any more", as_json)


def remove(cache_dir: Path | None, namespace: str | None, names: Sequence[str], access: Access, as_json: bool) -> int:
    server = find_server(_namespaces(cache_dir, namespace, access), access)
    return _each(names, server.remove, "removed", as_json)


def register(
    cache_dir: Path | None, namespace: str | None, name: str, file: Path, access: Access, as_json: bool
) -> int:
    """Errors: ConfigError, also for a file that is no text."""
    text = read_prompt(file, "the file")
    done = find_server(_namespaces(cache_dir, namespace, access), access).register(name, text)
    if as_json:
        _print_json(done)
    else:
        print(f"{name}: {done['tokens']} tokens, {done['prefilled_tokens']} of them computed now; kept in all tiers")
    return 0


def unregister(
    cache_dir: Path | None, namespace: str | None, names: Sequence[str], access: Access, as_json: bool
) -> int:
    server = find_server(_namespaces(cache_dir, namespace, access), access)
    return _each(names, server.unregister, "not registered any more", as_json)


def _each(names: Sequence[str], ask: Callable[[str], dict[str, Any]], done: str, as_json: bool) -> int:
    """Returns 1 if one of them could not be done."""
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
        _print_json(answers)
    return 1 if failed else 0


def _namespaces(cache_dir: Path | None, namespace: str | None, access: Access) -> Sequence[NamespaceInfo]:
    return [] if access.server is not None else _select(cache_dir, namespace)


def check(cache_dir: Path | None, namespace: str | None, repair: bool, as_json: bool) -> int:
    """Returns 1 if something is wrong and was not repaired, 2 if that was because somebody holds it."""
    reports = []
    failed = busy = False
    for info in _select(cache_dir, namespace):
        with progress() as report:
            try:
                counted = partial(report, f"Checking {info.path.name}")
                result = admin.check(info.path, repair=repair, progress=counted)
            except (ConfigError, StoreError) as error:
                failed, busy = True, busy or (repair and info.holder is not None)
                reports.append({"namespace": info.path.name, "ok": False, "error": str(error)})
                if not as_json:
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
        if not as_json:
            for problem in result.problems:
                print(f"{info.path.name}: {problem.kind} {problem.name}: {problem.detail}")
            count = len(result.problems)
            verdict = f"{count} problem{'s' if count > 1 else ''}" if count else "sound"
            if count:
                verdict += ", all repaired" if result.repaired else "; --repair mends them"
            print(f"{info.path.name}: {result.extents} extents, {format_size(result.bytes)}: {verdict}")
    if as_json:
        _print_json(reports)
    elif not reports:
        print(NOTHING)
    return 2 if busy else 1 if failed else 0


def clear(cache_dir: Path | None, namespace: str | None, yes: bool, as_json: bool) -> int:
    found = _select(cache_dir, namespace)
    total = sum(info.bytes for info in found)
    if found and not yes:
        if not sys.stdin.isatty():
            raise ConfigError("cache clear asks before it deletes; say --yes where nobody can answer")
        names = ", ".join(info.path.name + ("" if info.description else ", which cannot be read") for info in found)
        answer = input(f"Delete {format_size(total)} of cached KV ({names})? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return 1
    freed = {info.path.name: _clear(info) for info in found}
    if as_json:
        _print_json([{"namespace": name, "bytes_freed": size} for name, size in freed.items()])
    else:
        for name, size in freed.items():
            print(f"{name}: {format_size(size)} freed")
        if not freed:
            print("there was nothing to delete")
    return 0


def _clear(info: NamespaceInfo) -> int:
    """Remove the extents, and the texts of stored responses. Errors: ConfigError, if somebody holds them."""
    before = bytes_below(info.path)
    if info.description is None:
        _empty(info)
        return max(0, before - bytes_below(info.path))
    admin.clear(info.path)
    with Namespace.open_existing(info.path):
        try:
            conversations.erase(info.path)
        except OSError as error:
            raise StoreError(f"cannot clear {info.path}: {error.strerror}") from error
    return max(0, before - bytes_below(info.path))


def _empty(info: NamespaceInfo) -> None:
    """Remove all that is in a namespace of another version, or whose description is damaged. Errors as `_clear`."""
    try:
        with locked(info.path):
            # The description last: with it, what is left is still found if this ends half-way. The file of the lock stays: a
            # process that waits for it must not hold another one of that name.
            for entry in sorted(info.path.iterdir(), key=lambda entry: entry.name == DESCRIPTION):
                if entry.name != LOCK:
                    remove_path(entry)
    except OSError as error:
        raise StoreError(f"cannot clear {info.path}: {error.strerror}") from error


def _select(cache_dir: Path | None, namespace: str | None) -> Sequence[NamespaceInfo]:
    """All namespaces, or the one whose name begins with `namespace`. Errors: ConfigError."""
    folder = cache_dir or default_cache_dir()
    if cache_dir is not None and not cache_dir.is_dir():
        raise ConfigError(f"there is no cache directory {cache_dir}")
    found = admin.list_namespaces(folder)
    if namespace is None:
        return found
    fitting = [info for info in found if info.path.name.startswith(namespace)]
    exact = [info for info in fitting if info.path.name == namespace]
    if len(exact or fitting) != 1:
        names = ", ".join(info.path.name for info in (fitting or found)) or "none"
        what = "no namespace is" if not fitting else "several namespaces are"
        raise ConfigError(f"{what} called {namespace!r} in {folder}; there are: {names}")
    return exact or fitting


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
    if moment is None:
        return "never"
    seconds = max(0.0, time.time() - moment)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _until(moment: float) -> str:
    """In how much time."""
    return f"in {_ago(2 * time.time() - moment).removesuffix(' ago')}" if moment > time.time() else "now"


def _lines(facts: Mapping[str, Any], indent: str = "") -> None:
    """Nested figures, one line each."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            print(f"{indent}{name.replace('_', ' ')}")
            _lines(value, indent + "  ")
        elif name != "object" and value is not None:
            print(f"{indent}{name.replace('_', ' '):22} {value}")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Plain columns: they look the same on a terminal and in a pipe."""
    lines = [tuple(heads), *map(tuple, rows)]
    if len(lines) == 1:
        print(NOTHING)
        return
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))
