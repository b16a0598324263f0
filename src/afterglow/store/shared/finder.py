"""Finds the extents of a prompt that other engines have published: by one question to a directory, or else by listings, one for each
extent on the way.

Nothing that is found is believed: an extent counts only if its id is the digest of the prompt's own tokens, the salt and the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from afterglow.config import MAX_EXTENT_ROWS
from afterglow.errors import DamageError, StoreError
from afterglow.plan.prefix.block_keys import BLOCK_ROWS, block_keys
from afterglow.plan.prefix.index import extent_id
from afterglow.plan.prefix.published import Published, listed_under
from afterglow.plan.prefix.shared_way import Candidate, choices, follow, promising, starts
from afterglow.plan.prefix.tree import common_rows
from afterglow.store.extents.head import decode_head
from afterglow.store.extents.layout import KVLayout
from afterglow.store.shared import directory
from afterglow.store.shared.directory import DirectoryObjects, Known, Question
from afterglow.store.shared.objects import Listed, Objects
from afterglow.store.shared.paths import Paths, published_at
from afterglow.store.shared.remote import Remote

MAX_BRANCHES: Final = 4  # extents whose tokens are read, because a prompt may follow a part of them
MAX_MISSING: Final = 8  # of them that are not there
MOST: Final = 0.5  # of a lookup's time that a directory has
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
    """Follows prompts through the published extents of one model."""

    def __init__(self, remote: Remote, paths: Paths, layout: KVLayout, digest: str) -> None:
        self._remote = remote
        self._paths = paths
        self._layout = layout
        self._digest = digest

    def find_nothing(self, objects: Objects) -> None:
        """Look for what is not there: after it the clients of the store and the directory have all that a lookup takes."""
        _some(objects, self._paths.under("0" * 40))
        if isinstance(objects, DirectoryObjects):
            objects.identify()
            objects.find(self._digest, Question(0, ("0" * 32,), 0))

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
        known = self._ask(prompt, min(starts(rows, prompt.known, prompt.forks)), end)

        def step(row: int) -> tuple[SharedExtent, int] | None:
            return self._step(prompt.salt, prompt.tokens, row, known, end)

        for each in follow(rows, prompt.known, prompt.forks, step):
            found(each)

    def _ask(self, prompt: Prompt, row: int, end: float) -> list[Candidate[Listed]] | None:
        """Ask a directory for what follows a row; None: there is no directory, or it does not know."""
        objects = self._remote.opened
        if not isinstance(objects, DirectoryObjects):
            return None
        first = row // BLOCK_ROWS
        blocks = block_keys(prompt.salt, prompt.tokens)[first:]
        question = Question(first, blocks, prompt.known // BLOCK_ROWS + 1 - first)
        known = self._remote.aside(
            lambda: objects.find(self._digest, question), min(MOST * _left(end), 2 * directory.CALL_S)
        )
        return None if known is None else _candidates(_agreeing(known))

    def _list(self, salt: str, tokens: bytes, row: int, end: float) -> list[Candidate[Listed]]:
        folder = self._paths.under(listed_under(salt, tokens[: 4 * (row + 1)]))
        listing = self._remote.call("listing extents", lambda objects: _some(objects, folder), _left(end))
        return _candidates((each, None) for each in listing)

    def _step(
        self, salt: str, tokens: bytes, row: int, known: list[Candidate[Listed]] | None, end: float
    ) -> tuple[SharedExtent, int] | None:
        """Find the extent that goes on the farthest from a row, of those that are known or listed, and the row that it reaches."""
        rows = len(tokens) // 4
        whole, parts = choices(self._list(salt, tokens, row, end) if known is None else known, row, rows)
        for each in whole:
            first, stop = each.published.first_row, each.published.end
            own = tokens[4 * first : 4 * stop]
            if extent_id(self._digest, salt, tokens[: 4 * first], own) == each.published.id:
                return SharedExtent(each.published, own, each.listed), stop
            parts.append(each)
        best, most, read = None, row, 0
        for part in promising(parts, row)[: MAX_BRANCHES + MAX_MISSING]:
            if read == MAX_BRANCHES:
                break
            published = part.published
            if (theirs := self._tokens(published, salt, tokens, end)) is None:
                if known is not None:
                    known.remove(part)
                continue
            read += 1
            same = common_rows(
                theirs, 0, tokens, published.first_row, min(len(theirs) // 4, rows - published.first_row)
            )
            if published.first_row + same > most:
                best, most = SharedExtent(published, theirs, part.listed), published.first_row + same
        return None if best is None else (best, most)

    def _tokens(self, published: Published, salt: str, tokens: bytes, end: float) -> bytes | None:
        """Read the tokens of an extent from its head; none, where it is damaged, or another's; None: it is not there, which a directory is told."""
        size, path = self._layout.head_bytes(published.rows), self._paths.extent(published.id)
        try:
            raw = self._remote.call("reading a head", lambda objects: objects.get(path, 0, size), _left(end))
            own = decode_head(raw, self._layout, self._digest, extent=published.id, rows=published.rows).record.tokens
        except DamageError:
            return b""
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                if isinstance(objects := self._remote.opened, DirectoryObjects):
                    objects.forget(path)
                return None
            raise
        same = extent_id(self._digest, salt, tokens[: 4 * published.first_row], own) == published.id
        return own if same else b""


def _candidates(found: Iterable[tuple[Listed, int | None]]) -> list[Candidate[Listed]]:
    """Keep what lists extents that have not expired."""
    now = time.time()
    read = [(published_at(listed.path), listed, agrees) for listed, agrees in found]
    return [
        Candidate(published, listed.modified, listed, agrees)
        for published, listed, agrees in read
        if published is not None and published.rows <= MAX_EXTENT_ROWS and published.lives(now)
    ]


def _agreeing(known: Iterable[Known]) -> list[tuple[Listed, int]]:
    """Pair what lists extents with the prompt's rows that they agree with: an extent agrees as far as one that agrees begins behind it. Blocks alone
    do not tell that of an extent which the prompt leaves within a block.
    """
    found = [(published, each) for each in known if (published := published_at(each.listed.path)) is not None]
    found.sort(key=lambda each: -each[0].first_row)
    agrees = {published.id: each.agrees for published, each in found}
    for published, each in found:
        if each.parent in agrees and agrees[published.id] > published.first_row:
            agrees[each.parent] = max(agrees[each.parent], published.first_row)
    return [(each.listed, agrees[published.id]) for published, each in found]


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
