"""`afterglow cache`: what the disk tier holds, whether it is sound, and getting rid of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from afterglow.cli.progress import progress
from afterglow.config import default_cache_dir, format_size
from afterglow.errors import ConfigError, StoreError
from afterglow.store import admin
from afterglow.store.admin import NamespaceInfo


def ls(cache_dir: Path | None, namespace: str | None, as_json: bool) -> int:
    """Namespaces; with `namespace`, its extents."""
    found = _select(cache_dir, namespace)
    if namespace is None:
        if as_json:
            _print_json([_facts(info) for info in found])
        else:
            _table(("namespace", "extents", "tokens", "size", "last used", "held by"), map(_row, found))
            _say_problems(found)
        return 0
    records = admin.list_extents(found[0].path)
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
                }
                for r in records
            ]
        )
    else:
        _table(
            ("extent", "after", "kind", "tokens", "size", "hits", "last used"),
            (
                (
                    r.id[:16],
                    f"{r.parent[:8]}+{r.parent_rows}" if r.parent else "-",
                    r.kind,
                    str(r.rows),
                    format_size(r.file_bytes),
                    str(r.hits),
                    _ago(r.last_used),
                )
                for r in records
            ),
        )
    return 0


def stats(cache_dir: Path | None, namespace: str | None, as_json: bool) -> int:
    found = _select(cache_dir, namespace)
    if as_json:
        _print_json([_facts(info) for info in found])
        return 0
    for info in found:
        facts = _facts(info)
        print(facts.pop("namespace"))
        for name, value in facts.items():
            if name == "bytes":
                value = format_size(value)
            elif name == "last_used":
                value = _ago(value)
            if value is not None:
                print(f"  {name.replace('_', ' '):14} {value}")
    return 0


def check(cache_dir: Path | None, namespace: str | None, repair: bool, as_json: bool) -> int:
    """Returns 1 if something is wrong and was not repaired."""
    reports = []
    failed = False
    for info in _select(cache_dir, namespace):
        with progress() as report:
            try:
                counted = partial(report, f"Checking {info.path.name}")
                result = admin.check(info.path, repair=repair, progress=counted)
            except (ConfigError, StoreError) as error:
                failed = True
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
    return 1 if failed else 0


def clear(cache_dir: Path | None, namespace: str | None, yes: bool, as_json: bool) -> int:
    found = _select(cache_dir, namespace)
    total = sum(info.bytes for info in found)
    if found and not yes:
        if not sys.stdin.isatty():
            raise ConfigError("cache clear asks before it deletes; say --yes where nobody can answer")
        names = ", ".join(info.path.name for info in found)
        answer = input(f"Delete {format_size(total)} of cached KV ({names})? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return 1
    freed = {info.path.name: admin.clear(info.path) for info in found}
    if as_json:
        _print_json([{"namespace": name, "bytes_freed": size} for name, size in freed.items()])
    else:
        for name, size in freed.items():
            print(f"{name}: {format_size(size)} freed")
        if not freed:
            print("there was nothing to delete")
    return 0


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
        "problem": info.problem,
    }


def _row(info: NamespaceInfo) -> tuple[str, ...]:
    holder = f"pid {info.holder.pid}" if info.holder else "-"
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


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Plain columns: they look the same on a terminal and in a pipe."""
    lines = [tuple(heads), *map(tuple, rows)]
    if len(lines) == 1:
        print("nothing is stored")
        return
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))
