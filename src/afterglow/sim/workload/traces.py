"""Recorded traces, read line by line: a trace does not have to fit in memory, and may be compressed with gzip.

    source = TraceSource(path)                  or with format="mooncake", skip_bad=True
    workload = Workload(source, pace="open")

What the formats say is in `sim/workload/trace_formats.py`; Afterglow's own is also in docs/format.md.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Generator, Iterator
from contextlib import closing
from heapq import heappop, heappush
from itertools import count, islice
from pathlib import Path
from typing import BinaryIO, cast

from afterglow.errors import ConfigError
from afterglow.sim.nearest import unknown
from afterglow.sim.workload.trace_formats import FORMATS, TraceReader, TraceSettings, recognise
from afterglow.sim.workload.trace_values import BadLine
from afterglow.sim.workload.turns import Conversation

MAX_LINE = 256 * 2**20  # bytes; a longer one is damage
LINES_TO_TELL = 20  # one of the first lines shows the format
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class TraceSource:
    """The conversations of a trace file, in order of their starts. Can be iterated over again.

    `format`: one of `trace_formats.FORMATS`, or None to find out. `skip_bad`: leave out what cannot be read, and count
    it in `skipped` (`first_bad` says why the first one was); otherwise it is an error. `rate` and `seed` are for formats
    without absolute times: sessions then begin as a Poisson process of so many per second.
    Raises: ConfigError, which names the line and its mistake.
    """

    def __init__(
        self,
        path: str | Path,
        format: str | None = None,
        *,
        skip_bad: bool = False,
        rate: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.path = Path(path)
        self.skip_bad = skip_bad
        self.skipped = 0
        self.first_bad: str | None = None
        self.conversations = 0
        if format is not None and format not in FORMATS:
            raise unknown("trace format", format, FORMATS)
        if not 0 < rate < 1e9:
            raise ConfigError(f"the rate must be a positive number of sessions per second, got {rate}")
        self._settings = TraceSettings(rate=rate, seed=seed)
        self._read_bytes = 0
        self._size = 0
        self.format = format or self._recognise()

    @property
    def fraction(self) -> float:
        """How much of the file has been read, 0 to 1."""
        return min(1.0, self._read_bytes / self._size) if self._size else 0.0

    def __iter__(self) -> Iterator[Conversation]:
        self.skipped, self.first_bad, self.conversations = 0, None, 0
        reader = FORMATS[self.format](self._settings)
        waiting: list[tuple[float, int, Conversation]] = []  # read, but something earlier may follow
        order = count()
        given = float("-inf")
        with closing(self._lines()) as lines:
            for number, line in lines:
                for conversation in self._parse(reader, number, line, given):
                    heappush(waiting, (conversation.start, next(order), conversation))
                given = max(given, reader.complete_until)
                while waiting and waiting[0][0] <= given:
                    yield self._given(heappop(waiting)[2])
        while waiting:
            yield self._given(heappop(waiting)[2])
        if not self.conversations:
            raise ConfigError(f"{self.path} has no requests in it" + (f"; {self.first_bad}" if self.first_bad else ""))

    def _given(self, conversation: Conversation) -> Conversation:
        self.conversations += 1
        return conversation

    def _parse(self, reader: TraceReader, number: int, line: bytes, given: float) -> list[Conversation]:
        try:
            found = reader.read(_text(line))
            early = next((c for c in found if c.start < given), None)
            if early is not None:
                raise BadLine(f"it is at {early.start:g} s, earlier than the lines before it ({given:g} s)")
        except BadLine as error:
            reason = f"{self.path}, line {number}: {error}"
            if not self.skip_bad:
                raise ConfigError(f"{reason} (--skip-bad leaves such lines out)") from None
            self.skipped += 1
            self.first_bad = self.first_bad or reason
            return []
        return found

    def _lines(self) -> Generator[tuple[int, bytes], None, None]:
        """Iterate over (number, line) of lines that are not empty. Raises: ConfigError."""
        number = 0
        try:
            with self.path.open("rb") as raw:
                self._size = os.fstat(raw.fileno()).st_size
                magic = raw.read(4)
                raw.seek(0)
                if magic == _ZSTD:
                    raise ConfigError(f"{self.path} is compressed with zstd; decompress it first (zstd -dc)")
                file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if magic[:2] == _GZIP else raw
                while line := file.readline(MAX_LINE + 1):
                    number += 1
                    self._read_bytes = raw.tell()
                    if len(line) > MAX_LINE:
                        raise ConfigError(
                            f"{self.path}, line {number}: it is longer than {MAX_LINE} bytes; not a trace?"
                        )
                    if line.strip():
                        yield number, line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(f"{self.path}, after line {number}: the compressed data is damaged: {error}") from None
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror or error}") from None

    def _recognise(self) -> str:
        """Recognise the format by the first lines. Raises: ConfigError."""
        empty = True
        with closing(self._lines()) as lines:
            for _, line in islice(lines, LINES_TO_TELL):
                empty = False
                try:
                    found = recognise(_text(line))
                except BadLine:
                    continue  # it may only be damaged: the next one tells
                if found is not None:
                    return found
        if empty:
            raise ConfigError(f"{self.path} is empty: a trace has a line for each request (see docs/format.md)")
        raise ConfigError(
            f"cannot tell what kind of trace {self.path} is; there are {', '.join(FORMATS)} (see docs/format.md): "
            "name one with --format"
        )


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise BadLine("it is not UTF-8") from None
