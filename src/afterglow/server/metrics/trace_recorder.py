"""`--record-trace FILE`: records requests as lengths and hashes, for `afterglow simulate` and `afterglow plan`.

No text, token, key or name is written. A block of 64 tokens becomes a keyed hash; the secret is drawn when recording
begins and stored nowhere, so that a hash cannot be compared with the hash of a guess. A hash covers the tenant's salt
and all tokens before the block: equal hashes mean equal prefixes of one tenant, and texts of two tenants never look
alike. Names of conversations are hashed in the same way. Two recordings have nothing in common.

A thread makes and writes the lines, one write each: a slow or full disk costs lines, never a request.
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

MAX_PENDING = 4096  # requests that wait to be written; further ones are left out
HASH = 8  # bytes of a digest that are written
SESSIONS = 2000  # conversations whose last turn is remembered
ENDS = 10_000  # last blocks that are remembered, to recognise conversations without names
CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Ended:
    """A finished request. Times in seconds since 1970. All requests that arrived before `until` have finished too."""

    request: Request
    output: Sequence[int]
    arrived: float
    ended: float
    until: float


@dataclass(frozen=True, slots=True)
class _LastTurn:
    """The last turn of a conversation. `ends`: lengths and digests of the token strings that a next turn may begin
    with: the whole context; or the prompt alone, where the client changes replies or their text is tokenised
    differently."""

    ends: tuple[tuple[int, bytes], ...]
    blocks: bytes  # their hashes, HASH bytes each
    ended: float


class TraceRecorder:
    """Appends one line per request to a file. Call `began` and `ended` on the event loop."""

    def __init__(self, path: Path) -> None:
        """Open the file and start the thread. Raises: ConfigError, if the file cannot be opened."""
        self.path = path
        self.lost = 0  # requests that are not in the file
        self._file = open_for_appending(path)
        self._running: dict[str, float] = {}  # arrivals, in order
        self._offset = time.time() - time.monotonic()  # a clock that does not jump
        self._queue: queue.Queue[_Ended | None] = queue.Queue(MAX_PENDING + 1)
        self.rows = TraceRows(secrets.token_bytes(32))
        self._thread = threading.Thread(target=self._main, name="trace-recorder", daemon=True)
        self._thread.start()

    def began(self, request: Request) -> None:
        """Note the arrival of a request."""
        self._running[request.id] = self._now()

    def ended(self, request: Request, output: Sequence[int]) -> None:
        """Queue the line of a request. `output`: its tokens, also if it was cancelled or has failed."""
        now = self._now()
        arrived = self._running.pop(request.id, now)
        until = next(iter(self._running.values()), now)
        if self._queue.qsize() >= MAX_PENDING:
            self._lose("the disk is slower than the requests")
            return
        self._queue.put_nowait(_Ended(request, tuple(output), arrived, now, until))

    def close(self) -> None:
        """Write the queued lines, and end."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            os.close(self._file)

    def _now(self) -> float:
        return time.monotonic() + self._offset

    def _main(self) -> None:
        torn = False  # the file ends in a part of a line
        while (item := self._queue.get()) is not None:
            try:
                line = json.dumps(self.rows.row(item), separators=(",", ":")).encode() + b"\n"
                line = b"\n" + line if torn else line
                torn = True
                torn = os.write(self._file, line) < len(line)
                if torn:
                    raise OSError("only a part of a line was written")
            except Exception as error:  # no error may reach the requests
                self._lose(str(error))

    def _lose(self, reason: str) -> None:
        self.lost += 1
        if self.lost == 1:
            log.warning("the trace %s will be incomplete: %s", self.path, reason)


class TraceRows:
    """Makes the rows of the trace, and remembers earlier turns to recognise conversations. Used by one thread."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._sessions: OrderedDict[str, _LastTurn] = OrderedDict()
        # Ends of contexts: hash of the whole blocks -> (tokens after them, digest of all tokens) -> conversation.
        self._ends: OrderedDict[bytes, dict[tuple[int, bytes], str]] = OrderedDict()
        self._unnamed = 0

    def row(self, item: _Ended) -> dict[str, object]:
        """Make the row of a request; docs/format.md describes its fields."""
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
        row: dict[str, object] = {
            "time": round(item.arrived, 6),
            "session": session,
            "prompt_tokens": length,
            "new_tokens": length - (self._shared(before, chain, prompt, blocks) if before is not None else 0),
            "output_tokens": len(item.output),
            "block_hashes": [digest[:HASH].hex() for digest in chain[1:]],
            "think_time": round(max(0.0, item.arrived - before.ended), 6) if before is not None else None,
            "complete_until": round(item.until, 6),
        }
        if request.breakpoints:
            row["breakpoints"] = [[each.rows, each.ttl_s] for each in request.breakpoints]
        ends = tuple((size, self._end(chain, context, size)) for size in dict.fromkeys((len(context) // 4, length)))
        self._sessions[session] = _LastTurn(ends, blocks, item.ended)
        self._sessions.move_to_end(session)
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)
        if not named:
            for size, digest in ends:
                self._remember_end(chain[size // BLOCK_ROWS], size % BLOCK_ROWS, digest, session)
        return row

    def _chain(self, salt: str, tokens: bytes) -> list[bytes]:
        """Digest the first 0, 1, 2, ... blocks of a token string."""
        step = 4 * BLOCK_ROWS
        found = [self._digest(salt.encode())]
        for start in range(0, len(tokens) - step + 1, step):
            found.append(self._digest(found[-1] + tokens[start : start + step]))
        return found

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16, key=self._secret).digest()

    def _end(self, chain: list[bytes], tokens: bytes, size: int) -> bytes:
        """Digest the first `size` tokens."""
        whole = size // BLOCK_ROWS
        return self._digest(chain[whole] + tokens[4 * BLOCK_ROWS * whole : 4 * size])

    def _shared(self, before: _LastTurn, chain: list[bytes], prompt: bytes, blocks: bytes) -> int:
        """Count the tokens that a prompt has in common with the last turn: its context, its prompt, or whole blocks."""
        for size, digest in before.ends:
            if 4 * size < len(prompt) and self._end(chain, prompt, size) == digest:
                return size
        ours, most = before.blocks, min(len(before.blocks), len(blocks))
        same = next((i for i in range(0, most, HASH) if ours[i : i + HASH] != blocks[i : i + HASH]), most)
        return min(same // HASH * BLOCK_ROWS, len(prompt) // 4 - 1)

    def _continued(self, chain: list[bytes], prompt: bytes) -> str | None:
        """Find the conversation without a name whose context, the longest one, this prompt begins with."""
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
    """Open a file that only its owner can read. Raises: ConfigError."""
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
