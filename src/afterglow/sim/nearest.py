"""Suggestions for a name that is not there."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from afterglow.errors import ConfigError


def unknown(kind: str, name: str, known: Iterable[str], remedy: str = "") -> ConfigError:
    """An error that names what comes nearest, or all there is. `remedy`: what else could have been given."""
    names = sorted(known)
    folded = {_fold(item): item for item in names}
    asked = _fold(name)
    near = [folded[item] for item in get_close_matches(asked, list(folded), n=3, cutoff=0.5)]
    near += [item for item in names if item not in near and asked and asked in _fold(item)]
    said = f"did you mean {' or '.join(near[:4])}?" if near else f"there are {', '.join(names)}"
    return ConfigError(f"unknown {kind} {name!r}: {said}{f' {remedy}' if remedy else ''}")


def find(name: str, known: Iterable[str]) -> str | None:
    """Find a name regardless of case and punctuation, and return it as it is written."""
    return {_fold(item): item for item in known}.get(_fold(name))


def _fold(name: str) -> str:
    return "".join(c for c in name.casefold() if c.isalnum())
