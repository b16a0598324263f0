"""Finds the extents of a prompt that other engines have published: by listings, one for each extent on the way.

Nothing that is found is believed: an extent counts only if its id is the digest of the prompt's own tokens, the salt and the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from afterglow.config import MAX_EXTENT_ROWS
from afterglow.errors import DamageError, StoreError
from afterglow.plan.prefix.index import common_rows, extent_id
from afterglow.plan.prefix.published import Published, listed_under
from afterglow.store.extents.head import decode_head
from afterglow.store.extents.layout import KVLayout
from afterglow.store.shared.objects import Listed, Objects
from afterglow.store.shared.paths import Paths, published_at
from afterglow.store.shared.remote import Remote

MAX_BRANCHES: Final = 4  # extents whose tokens are read, because a prompt may follow a part of them
MAX_LISTED: Final = 1000  # of the extents that begin alike


class SharedExtent(NamedTuple):
    """A published extent on a prompt's way. `tokens`: its own, uint32 little-endian; `listed`: the object that lists it, and
    since when it does.
    """

    published: Published
    tokens: bytes
    listed: Listed


class Prompt(NamedTuple):
    """A prompt that is looked up: tokens as uint32, little-endian. `known`: its first rows, which are cached here; `forks`: where the
    last extents of these begin, which another engine may have merged with what follows.
    """

    salt: str
    tokens: bytes
    known: int = 0
    forks: Sequence[int] = ()


class Finder:
    """Follows prompts through the listings of one model."""

    def __init__(self, remote: Remote, paths: Paths, layout: KVLayout, digest: str) -> None:
        self._remote = remote
        self._paths = paths
        self._layout = layout
        self._digest = digest

    def find_nothing(self, objects: Objects) -> None:
        """List what nothing is listed under: after it the store's client has all that a lookup takes."""
        _some(objects, self._paths.under("0" * 40))

    def find(self, prompt: Prompt, seconds: float, found: Callable[[SharedExtent], object]) -> None:
        """Tell `found` of the published extents of a prompt, in order, for at most so many seconds.

        An engine whose conversation another has gone on with finds the rest where its own rows end, or where one of its last extents
        begins, if that has been merged meanwhile. Another engine's tree may have other forks: its way is followed from the first
        row on, if that can bring more rows than are cached here. So a conversation that stays where it is costs few listings,
        however long it is.

        Raises:
            StoreError: the store fails, or takes too long. What was found before that is right.
        """
        end = time.monotonic() + seconds
        rows = len(prompt.tokens) // 4
        starts = [prompt.known, *prompt.forks, *([0] if rows > 2 * prompt.known else [])]
        for start in dict.fromkeys(starts):
            row = start
            while row < rows and (step := self._step(prompt.salt, prompt.tokens, row, end)) is not None:
                found(step)
                first = step.published.first_row
                row = first + common_rows(step.tokens, 0, prompt.tokens, first, min(step.published.rows, rows - first))
            if row > prompt.known:
                return

    def _step(self, salt: str, tokens: bytes, row: int, end: float) -> SharedExtent | None:
        """Find the extent that goes on the farthest from a row."""
        folder = self._paths.under(listed_under(salt, tokens[: 4 * (row + 1)]))
        listing = self._remote.call("listing extents", lambda objects: _some(objects, folder), _left(end))
        rows = len(tokens) // 4
        whole: list[tuple[Published, Listed]] = []
        parts: list[tuple[Published, Listed]] = []
        for each in listing:
            published = published_at(each.path)
            if published is None or published.rows > MAX_EXTENT_ROWS or not published.first_row <= row < published.end:
                continue
            if not published.lives(time.time()):
                continue
            (whole if published.end <= rows else parts).append((published, each))
        for published, each in sorted(whole, key=lambda pair: (-pair[0].end, pair[0].id)):
            own = tokens[4 * published.first_row : 4 * published.end]
            if extent_id(self._digest, salt, tokens[: 4 * published.first_row], own) == published.id:
                return SharedExtent(published, own, each)
            parts.append((published, each))
        parts.sort(key=lambda pair: (-pair[1].modified, pair[0].id))
        best, most = None, row
        for published, each in parts[:MAX_BRANCHES]:
            own = self._tokens(published, salt, tokens, end)
            same = common_rows(own, 0, tokens, published.first_row, min(len(own) // 4, rows - published.first_row))
            if published.first_row + same > most:
                best, most = SharedExtent(published, own, each), published.first_row + same
        return best

    def _tokens(self, published: Published, salt: str, tokens: bytes, end: float) -> bytes:
        """Read the tokens of an extent from its head; none, where it is not there, damaged, or another's."""
        size, path = self._layout.head_bytes(published.rows), self._paths.extent(published.id)
        try:
            raw = self._remote.call("reading a head", lambda objects: objects.get(path, 0, size), _left(end))
            own = decode_head(raw, self._layout, self._digest, extent=published.id, rows=published.rows).record.tokens
        except DamageError:
            return b""
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return b""
            raise
        same = extent_id(self._digest, salt, tokens[: 4 * published.first_row], own) == published.id
        return own if same else b""


def _left(end: float) -> float:
    """Return the seconds until `end`.

    Raises:
        StoreError: it is over.
    """
    left = end - time.monotonic()
    if left <= 0:
        raise StoreError("looking up a prompt took too long") from TimeoutError()
    return left


def _some(objects: Objects, folder: str) -> list[Listed]:
    found: list[Listed] = []
    for some in objects.list(folder):
        found += some
        if len(found) >= MAX_LISTED:
            break
    return found
