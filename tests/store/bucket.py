"""An object store in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

from afterglow.store.shared.objects import Listed


class Bucket:
    """Objects in a dict; `down`: every call fails."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.modified: dict[str, float] = {}
        self.calls = 0
        self.down = False

    def _call(self) -> None:
        self.calls += 1
        if self.down:
            raise ConnectionRefusedError("down")

    def get(self, path: str, start: int, length: int) -> bytes:
        self._call()
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][start : start + length]

    def put(self, path: str, data: bytes, *, replace: bool = False) -> bool:
        self._call()
        if path in self.objects and not replace:
            return False
        self.objects[path] = data
        self.modified[path] = time.time()
        return True

    def list(self, prefix: str) -> Iterator[list[Listed]]:
        self._call()
        yield [Listed(p, len(d), self.modified[p]) for p, d in [*self.objects.items()] if p.startswith(f"{prefix}/")]

    def delete(self, path: str) -> None:
        self._call()
        self.objects.pop(path, None)
