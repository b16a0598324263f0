"""Where objects of the shared tier lie, below its URL. The digest names the model and all that its rows depend on.

DIGEST/extents/ab/abcdef….safetensors     the very file of the disk tier
DIGEST/kids/12/1234…/ID-FIRST-ROWS-EXPIRES   says under which tokens an extent is found, and when it was last used; holds its lead (see
                                             `plan.prefix.block_keys`), from which a directory is filled
"""

from __future__ import annotations

from afterglow.plan.prefix.published import Published
from afterglow.plan.step import ExtentId


class Paths:
    """Names of one model's objects."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.extents = f"{digest}/extents"
        self.kids = f"{digest}/kids"

    def extent(self, extent: ExtentId) -> str:
        """Name the object of an extent."""
        return f"{self.extents}/{extent[:2]}/{extent}.safetensors"

    def under(self, key: str) -> str:
        """Name the folder of all extents that are listed under a key (see `listed_under`)."""
        return f"{self.kids}/{key[:2]}/{key}"

    def kid(self, key: str, published: Published) -> str:
        """Name the object that lists an extent under a key."""
        return f"{self.under(key)}/{published}"


def extent_of(path: str) -> ExtentId:
    """Return the id of the extent whose object lies at a path."""
    return path.rsplit("/", 1)[-1].removesuffix(".safetensors")


def published_at(path: str) -> Published | None:
    """Return the extent that the object at a path lists; None: it is not of ours."""
    return Published.parse(path.rsplit("/", 1)[-1])
