"""`--record-trace FILE`: what was asked for, as lengths and hashes, for `afterglow simulate` and `afterglow plan`.

No text, no token, no key and no name is written. A block of 64 tokens becomes a hash that is keyed with a secret which is
drawn when recording begins and kept nowhere, so that a hash cannot be compared with the hash of a guess; and it covers the
tenant's salt and all tokens before it, so that equal hashes mean equal prefixes of one tenant, and texts of two tenants
never look alike. Conversations' names are hashed in the same way. Two recordings have nothing in common.

Lines are made and written by a thread of their own, one write each: a slow or full disk costs lines, never a request.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import secrets
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afterglow.config import BLOCK_ROWS
from afterglow.errors import ConfigError
from afterglow.request import Request

log = logging.getLogger("afterglow.server")

MAX_PENDING = 4096  # requests that wait to be written; beyond it they are left out
HASH = 8  # bytes of a digest that are written
SESSIONS = 2000  # whose last turn is remembered
ENDS = 10_000  # last blocks by which conversations without names are known again
CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that is over. Times in seconds since 1970; whatever arrived before `until` is over too."""

    request: Request
    output: Sequence[int]
    arrived: float
    ended: float
    until: float


@dataclass(frozen=True, slots=True)
class _Session:
    """A conversation as of its last turn. `ends`: lengths and digests of what a next turn may begin with: all of it, or
    the prompt alone, where the client changes replies, or their text becomes other tokens."""

    ends: tuple[tuple[int, bytes], ...]
    blocks: bytes  # their hashes, HASH bytes each
    ended: float


class TraceRecorder:
    """Appends one line per request to a file. `began` and `ended` belong to the event loop."""

    def __init__(self, path: Path) -> None:
        """Errors: ConfigError, if the file cannot be opened."""
        self.path = path
        self.lost = 0  # requests that are not in the file
        self._file = open_for_appending(path)
        self._running: dict[str, float] = {}  # arrivals, in order
        self._offset = time.time() - time.monotonic()  # a clock that does not jump
        self._queue: queue.Queue[_Ended | None] = queue.Queue(MAX_PENDING + 1)
        self._hashes = Hashes(secrets.token_bytes(32))
        self._thread = threading.Thread(target=self._main, name="trace-recorder", daemon=True)
        self._thread.start()

    def began(self, request: Request) -> None:
        self._running[request.id] = self._now()

    def ended(self, request: Request, output: Sequence[int]) -> None:
        """`output`: the tokens it has got, also if it was cancelled or has failed."""
        now = self._now()
        arrived = self._running.pop(request.id, now)
        until = next(iter(self._running.values()), now)
        if self._queue.qsize() >= MAX_PENDING:
            self._lose("the disk is slower than the requests")
            return
        self._queue.put_nowait(_Ended(request, tuple(output), arrived, now, until))

    def close(self) -> None:
        """Write what is left, and end."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            os.close(self._file)

    def _now(self) -> float:
        return time.monotonic() + self._offset

    def _main(self) -> None:
        torn = False  # does the file end in a part of a line?
        while (item := self._queue.get()) is not None:
            try:
                line = json.dumps(self._hashes.row(item), separators=(",", ":")).encode() + b"\n"
                line = b"\n" + line if torn else line
                torn = True
                torn = os.write(self._file, line) < len(line)
                if torn:
                    raise OSError("only a part of a line was written")
            except Exception as error:  # whatever it is, requests are not to notice
                self._lose(str(error))

    def _lose(self, reason: str) -> None:
        self.lost += 1
        if self.lost == 1:
            log.warning("the trace %s will be incomplete: %s", self.path, reason)


class Hashes:
    """Rows of the trace, and what is known of earlier ones to tell which conversation goes on. One thread's."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        # Of ends: hash of their whole blocks -> (tokens after them, digest of everything) -> conversation.
        self._ends: OrderedDict[bytes, dict[tuple[int, bytes], str]] = OrderedDict()
        self._unnamed = 0

    def row(self, item: _Ended) -> dict[str, object]:
        """See docs/format.md."""
        request = item.request
        prompt = array("I", request.prompt).tobytes()
        context = prompt + array("I", item.output).tobytes()
        chain = self._chain(request.salt, context)
        blocks = b"".join(digest[:HASH] for digest in chain[1:])
        length = len(request.prompt)
        named = request.session_id is not None
        if named:
            session = self._digest(f"{request.salt} session {request.session_id}".encode())[:HASH].hex()
        else:
            session = self._continued(chain, prompt) or self._new_session()
        before = self._sessions.get(session)
        row = {
            "time": round(item.arrived, 6),
            "session": session,
            "prompt_tokens": length,
            "new_tokens": length - (self._shared(before, chain, prompt, blocks) if before is not None else 0),
            "output_tokens": len(item.output),
            "block_hashes": [digest[:HASH].hex() for digest in chain[1:]],
            "think_time": round(max(0.0, item.arrived - before.ended), 6) if before is not None else None,
            "complete_until": round(item.until, 6),
        }
        ends = tuple((size, self._end(chain, context, size)) for size in dict.fromkeys((len(context) // 4, length)))
        self._sessions[session] = _Session(ends, blocks, item.ended)
        self._sessions.move_to_end(session)
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)
        if not named:
            for size, digest in ends:
                self._remember_end(chain[size // BLOCK_ROWS], size % BLOCK_ROWS, digest, session)
        return row

    def _chain(self, salt: str, tokens: bytes) -> list[bytes]:
        """Of nothing, of the first block, of the first two, ..."""
        step = 4 * BLOCK_ROWS
        found = [self._digest(salt.encode())]
        for start in range(0, len(tokens) - step + 1, step):
            found.append(self._digest(found[-1] + tokens[start : start + step]))
        return found

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16, key=self._secret).digest()

    def _end(self, chain: list[bytes], tokens: bytes, size: int) -> bytes:
        """A digest of the first `size` tokens."""
        whole = size // BLOCK_ROWS
        return self._digest(chain[whole] + tokens[4 * BLOCK_ROWS * whole : 4 * size])

    def _shared(self, before: _Session, chain: list[bytes], prompt: bytes, blocks: bytes) -> int:
        """Tokens that a prompt has in common with its conversation so far: all of it, its prompt, or whole blocks."""
        for size, digest in before.ends:
            if 4 * size < len(prompt) and self._end(chain, prompt, size) == digest:
                return size
        ours, most = before.blocks, min(len(before.blocks), len(blocks))
        same = next((i for i in range(0, most, HASH) if ours[i : i + HASH] != blocks[i : i + HASH]), most)
        return min(same // HASH * BLOCK_ROWS, len(prompt) // 4 - 1)

    def _continued(self, chain: list[bytes], prompt: bytes) -> str | None:
        """The conversation without a name that this prompt begins with, the longest one."""
        for whole in range(len(prompt) // (4 * BLOCK_ROWS), -1, -1):
            ends = self._ends.get(chain[whole])
            if not ends:
                continue
            room = len(prompt) // 4 - whole * BLOCK_ROWS
            for more in sorted({more for more, _ in ends if more < room}, reverse=True):
                found = ends.get((more, self._end(chain, prompt, whole * BLOCK_ROWS + more)))
                if found is not None:
                    return found
        return None

    def _remember_end(self, blocks: bytes, more: int, digest: bytes, session: str) -> None:
        ends = self._ends.setdefault(blocks, {})
        self._ends.move_to_end(blocks)
        ends[more, digest] = session
        if len(ends) > SESSIONS:
            del ends[next(iter(ends))]
        if len(self._ends) > ENDS:
            self._ends.popitem(last=False)

    def _new_session(self) -> str:
        self._unnamed += 1
        return self._digest(f"unnamed {self._unnamed}".encode())[:HASH].hex()


def open_for_appending(path: Path) -> int:
    """A file that only its owner can read. Errors: ConfigError."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                os.write(file, b"\n")  # the last recording was interrupted
        except OSError:
            os.close(file)
            raise
    except OSError as error:
        raise ConfigError(f"--record-trace: cannot write {path}: {error.strerror}") from None
    return file
