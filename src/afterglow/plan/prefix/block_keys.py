"""Chained hashes of blocks of tokens, under which a directory knows extents: one look finds all that a prompt may begin with.

The n-th hash is of a beginning's first n blocks, keyed by its tenant's salt. An extent is found under every beginning that ends in
it; one that none ends in is found under the last before it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from afterglow.plan.prefix.published import Published
from afterglow.plan.step import ExtentId

BLOCK_ROWS: Final = 64

_TEXT: Final = re.compile(r"(-|[0-9a-f]{40})((?: [0-9a-f]{32}){1,1024})")


def block_keys(salt: str, tokens: bytes, known: Sequence[str] = ()) -> list[str]:
    """Hash the beginnings of 0, 64, 128, ... tokens: 32 hexadecimal digits each. `tokens`: uint32, little-endian. `known`: the first ones."""
    key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
    keyed = hashlib.blake2b(digest_size=16, key=key, person=b"afterglow block")
    keys = [*known]
    before = bytes.fromhex(keys[-1]) if keys else b""
    for end in range(4 * BLOCK_ROWS * len(keys), len(tokens) + 1, 4 * BLOCK_ROWS):
        hashed = keyed.copy()
        hashed.update(before + tokens[max(0, end - 4 * BLOCK_ROWS) : end])
        before = hashed.digest()
        keys.append(before.hex())
    return keys


class Lead(NamedTuple):
    """How an extent is found in a directory: the extent before it in its engine's tree, and the hashes that lead to it."""

    parent: ExtentId | None
    blocks: Sequence[str]

    def __str__(self) -> str:
        return " ".join((self.parent or "-", *self.blocks))

    @classmethod
    def parse(cls, text: str) -> Lead | None:
        """Read a lead; None: it is none."""
        found = _TEXT.fullmatch(text)
        return None if found is None else cls(None if found[1] == "-" else found[1], found[2].split())


def lead_to(published: Published, parent: ExtentId | None, keys: Sequence[str]) -> Lead:
    """Say how an extent is found. `keys`: of the tokens before it and its own."""
    first = published.first_row // BLOCK_ROWS
    return Lead(parent, keys[first + 1 :] or keys[first:])
