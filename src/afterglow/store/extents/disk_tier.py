"""The disk tier: one safetensors file per extent. Knows no catalog, and no threads but the one for checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from afterglow.plan.step import ExtentRecord
from afterglow.store.extents.chunks import ChunkRead, ChunkReader
from afterglow.store.extents.extent_folder import ExtentFolder
from afterglow.store.extents.extent_reader import ExtentReader
from afterglow.store.extents.extent_writer import ExtentWriter
from afterglow.store.extents.files import naming
from afterglow.store.extents.head import Bytes, Head
from afterglow.store.extents.layout import KVLayout
from afterglow.store.extents.rewriting import Ranks, Rewriting
from afterglow.store.extents.tier import ExtentRead, HostArena


class DiskTier:
    """Extents as files in one folder. See `Tier` for the methods' promises."""

    def __init__(
        self,
        path: Path,
        layout: KVLayout,
        digest: str,
        *,
        inspect: bool = False,
        remake: Callable[[], object] | None = None,
    ) -> None:
        """Open the folder. Temporary files of dead processes are removed, and all else that is no extent but for unknown folders
        (`strange`). `remake`: makes the folder around this one, if it is gone.

        `inspect`: only look, beside the process that owns the folder: nothing is made, tried or removed.

        Raises:
            StoreError: the folder cannot be used.
        """
        self.layout = layout
        self.digest = digest
        self.folder = ExtentFolder(path, remake)
        self.strange = 0 if inspect else self.folder.open()  # files and folders that do not belong there
        self._checksums = ThreadPoolExecutor(1, "afterglow-checksums")
        self._writer = ExtentWriter(self.folder, layout, digest, self._checksums)
        self._reader = ExtentReader(self.folder, layout, digest, self._checksums)
        self._chunks = ChunkReader(layout, digest, self.direct)

    def close(self) -> None:
        """End the thread for checksums; nothing can be written any more."""
        self._checksums.shutdown(wait=False)

    @property
    def direct(self) -> bool:
        """Whether files bypass the page cache."""
        return self.folder.direct

    def path(self, extent: str) -> Path:
        """Name the file of an extent, whether it is there or not."""
        return self.folder.file(extent)

    def write(self, record: ExtentRecord, arena: HostArena, slots: Sequence[int], progress: Callable[[], None]) -> int:
        """Store the blocks in `slots` as the extent `record`; blank the rows beyond its last in the arena."""
        written = self._writer.write(record, arena, slots, progress)
        self._chunks.forget(record.id)
        return written

    def read(self, read: ExtentRead, layer_done: Callable[[int], None], first: int = 0, stop: int | None = None) -> int:
        """Fill slots with layers [first, stop) of an extent's first blocks, each verified."""
        return self._reader.read(read, layer_done, range(self.layout.layers)[first:stop])

    def read_chunks(self, extent: str, rows: int, reads: Sequence[ChunkRead], edition: str) -> tuple[int, Head]:
        """Carry out `reads` of an extent of `rows` rows."""
        with naming(extent, "reading"):
            self.folder.check(extent)
            return self._chunks.read(str(self.path(extent)), extent, rows, reads, edition)

    def rewriting(
        self, extent: str, rows: int, ranks: Ranks, carried: Callable[[int], None] | None = None
    ) -> Rewriting:
        """Begin to put an extent's rows in another order. `carried` is told of the bytes of each layer that has been read and
        written.
        """
        return Rewriting(self.folder, self.layout, self.digest, extent, rows, ranks, carried)

    def rewritten(self, extent: str) -> None:
        """Forget the head of a file that has been replaced by a new version."""
        self._chunks.forget(extent)

    def head(self, extent: str) -> Head:
        """Read the verified head of an extent, whatever its row count."""
        return self._reader.head(self.path(extent), extent)

    def head_of(self, path: Path) -> Head:
        """Read the verified head of the file at `path`."""
        return self._reader.head(path)

    def verify(self, extent: str, seen: Callable[[int, int, Bytes], None] | None = None) -> Head:
        """Read every byte of an extent and compare it with the checksums; return its head. See `ExtentReader.verify`."""
        return self._reader.verify(extent, seen)

    def delete(self, extent: str) -> None:
        """Remove an extent; an extent that is not there is no error."""
        self.folder.delete(extent)
        self._chunks.forget(extent)

    def extents(self) -> Iterator[str]:
        """Yield the ids of all files that look like extents, by name."""
        return self.folder.extents()
