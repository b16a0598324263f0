"""The real scheduler and the real store, joined by a runner without tensors, on real files and threads.

A row's contents are bytes made from a hash of its salt and all tokens up to it, for each layer's keys and values: all
that attention's keys and values depend on. Whatever a job gathers from host slots, copies or takes over must be the
rows of its own tokens, byte for byte, or `WrongRow` is raised: a wrong byte would be a wrong token.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import mmap
import os
import shutil
import sqlite3
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from afterglow.config import BLOCK_ROWS
from afterglow.plan.journal.replaying import RecordingScheduler
from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.prefix.index import extent_id
from afterglow.plan.step import (
    Admit,
    Admitted,
    Drop,
    Event,
    ExtentRecord,
    JobSpec,
    Load,
    Move,
    MoveDone,
    Run,
    Save,
    Step,
    StepResult,
    Store,
    TransferDone,
)
from afterglow.store import admin
from afterglow.store.extents import pieces
from afterglow.store.extents.head import crc32c, encode_head
from afterglow.store.extents.layout import KVLayout
from afterglow.store.extents.tier import arena_bytes
from afterglow.store.kvstore import KVStore
from afterglow.store.namespace.namespace import Namespace, holder

Bytes = npt.NDArray[np.uint8]

LAYOUT = KVLayout(3, 2, 8, "F32")  # rows of 64 bytes, chunks of 4096: transfers go straight to the slots
DIGEST = "5eed" * 16
OTHER_DIGEST = "0dd5" * 16
EXTENT_ROWS = 2 * BLOCK_ROWS
FILE_BYTES = tuple(LAYOUT.file_bytes(blocks * BLOCK_ROWS) for blocks in range(1, EXTENT_ROWS // BLOCK_ROWS + 1))
VOCABULARY = 97
FLUSH_ROWS = 8  # decoded rows that leave together
TIMEOUT = 30.0  # seconds without progress after which a move is given up, where nothing is meant to hang
SHORT = 0.5  # and where something is
STEP_S, IDLE_S = 0.001, 0.02  # that pass for the plan in a step, and where a step has nothing to do
LIMIT = 90.0  # seconds after which a test says that something hangs: generous, the machine may be busy

Phase = str  # load, save, prefetch, evict, start


class WrongRow(AssertionError):
    """Bytes that are not those of the job's own tokens."""


class Hang(AssertionError):
    """Says that nothing has happened for a long time although a request waits."""


# ------------------------------------------------------------------------------------------------- contents


@functools.lru_cache(maxsize=1 << 17)
def _next_state(state: bytes, token: int) -> bytes:
    return hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=16).digest()


@functools.lru_cache(maxsize=1 << 15)
def _row(state: bytes) -> bytes:
    """[layers, 2, row_bytes] of the row whose tokens hash to `state`."""
    return b"".join(
        hashlib.blake2b(state, digest_size=LAYOUT.row_bytes, salt=bytes([layer, kv])).digest()
        for layer in range(LAYOUT.layers)
        for kv in (0, 1)
    )


class Text:
    """A token string of one tenant, and the contents of its rows for one model."""

    def __init__(self, salt: str, tokens: Iterable[int] = (), model: str = DIGEST) -> None:
        self.salt = salt
        self.tokens: list[int] = []
        self._states = [hashlib.blake2b(f"{model} {salt}".encode(), digest_size=16).digest()]
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self._states.append(_next_state(self._states[-1], token))

    def next(self) -> int:
        """The model: the next token is a function of all tokens before."""
        return int.from_bytes(self._states[-1][:4], "little") % VOCABULARY

    def rows(self, start: int, stop: int) -> Bytes:
        """uint8 [layers, 2, rows, row_bytes]."""
        raw = b"".join(_row(state) for state in self._states[start + 1 : stop + 1])
        rows = np.frombuffer(raw, np.uint8).reshape(stop - start, LAYOUT.layers, 2, LAYOUT.row_bytes)
        return np.ascontiguousarray(rows.transpose(1, 2, 0, 3))


def answer(salt: str, prompt: Sequence[int], max_tokens: int, model: str = DIGEST) -> list[int]:
    """What a job generates when nothing is cached."""
    text = Text(salt, prompt, model)
    for _ in range(max_tokens):
        text.append(text.next())
    return text.tokens[len(prompt) :]


def pack(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def words(name: str, turn: int, count: int) -> list[int]:
    """Make the tokens said in a turn: a function of the speaker and the turn."""
    seed = int.from_bytes(hashlib.blake2b(f"{name}/{turn}".encode(), digest_size=8).digest(), "little")
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, count)]


class Talk:
    """Holds a conversation: all tokens so far, the last reply included."""

    def __init__(self, name: str, salt: str = "a") -> None:
        self.name = name
        self.salt = salt
        self.turns = 0
        self.tokens: list[int] = words("system", 0, 70)  # the same for all tenants

    def prompt(self, new: int) -> list[int]:
        self.turns += 1
        return self.tokens + words(self.name, self.turns, new)

    def imagine(self, turns: int, new: int = 90, reply: int = 20) -> Talk:
        """Hold the conversation without any cache; as `World.say` would."""
        for _ in range(turns):
            prompt = self.prompt(new)
            self.tokens = prompt + answer(self.salt, prompt, reply)
        return self

    def copy(self) -> Talk:
        twin = Talk(self.name, self.salt)
        twin.turns, twin.tokens = self.turns, list(self.tokens)
        return twin


# --------------------------------------------------------------------------------------------------- runner


@dataclass
class Segment:
    """Holds rows of one context on the device: uint8 [layers, 2, capacity, row_bytes]; the first `rows` are valid."""

    data: Bytes
    rows: int = 0

    @classmethod
    def of(cls, capacity: int) -> Segment:
        return cls(np.full((LAYOUT.layers, 2, capacity, LAYOUT.row_bytes), 0xDD, np.uint8))

    @property
    def capacity(self) -> int:
        return int(self.data.shape[2])

    def grow(self, capacity: int) -> None:
        if capacity > self.capacity:
            old, self.data = self.data, Segment.of(capacity).data
            self.data[:, :, : old.shape[2]] = old


@dataclass
class Lane:
    """Decoded rows of a job that wait to be saved together."""

    save: Save
    count: int = 0


@dataclass
class Part:
    """One run of a step on its way through the layers."""

    run: Run
    text: Text
    segment: Segment
    fresh: Bytes  # the rows it computes
    saves: list[Save]
    gather_from: int  # the first row that its gathers bring
    failed: str | None = None


class Runner:
    """Carries out steps as the engine's runner does: layer by layer, waiting for each layer of each load."""

    def __init__(self, capacity: Capacity, store: KVStore, patience: float) -> None:
        self._capacity = capacity
        self._store = store
        self._patience = patience
        self._segments: dict[int, Segment] = {}
        self._contexts: dict[int, Segment] = {}
        self._lanes: dict[int, Lane] = {}
        self.texts: dict[int, Text] = {}
        self.gathered = 0  # rows that came from host slots and were compared

    def release(self, step: Step) -> None:
        for release in step.releases:
            self._flush(release.job)
            segment = self._segments.pop(release.job)
            if release.context is not None:
                assert 0 < release.rows <= segment.rows
                segment.rows = release.rows
                self._contexts[release.context] = segment
        for number in step.frees:
            del self._contexts[number]

    def run(self, step: Step) -> StepResult:
        parts = [self._part(run) for run in step.runs]
        for layer in range(LAYOUT.layers):
            for part in parts:
                self._layer(part, layer)
        result = StepResult({}, {part.run.job: part.failed for part in parts if part.failed is not None})
        for part in parts:
            if part.failed is None:
                part.segment.rows = part.run.start + len(part.run.tokens)
                if part.run.sample:
                    token = part.text.next()
                    part.text.append(token)
                    result.tokens[part.run.job] = token
            else:
                part.segment.rows = part.run.start
        for job in [job for job, lane in self._lanes.items() if lane.count >= FLUSH_ROWS]:
            self._flush(job)
        used = [*self._segments.values(), *self._contexts.values()]
        assert sum(segment.capacity for segment in used) <= self._capacity.device_rows, "the device budget"
        return result

    def _part(self, run: Run) -> Part:
        text = self.texts[run.job]
        if run.admit is not None:
            self._segments[run.job] = self._admit(run, run.admit, text)
        segment = self._segments[run.job]
        segment.grow(run.capacity)
        stop = run.start + len(run.tokens)
        assert list(run.tokens) == text.tokens[run.start : stop], "tokens that are not the job's own"
        assert segment.rows + sum(gather.stop - gather.start for gather in run.gathers) == run.start
        part = Part(run, text, segment, text.rows(run.start, stop), [], gather_from=segment.rows)
        for save in run.saves:
            if len(run.tokens) == 1 and run.admit is None and run.sample:
                self._wait_in_lane(run.job, save)
            else:
                part.saves.append(save)
        return part

    def _admit(self, run: Run, admit: Admit, text: Text) -> Segment:
        assert run.job not in self._segments
        if admit.context is None:
            assert admit.device_rows == 0
            segment = Segment.of(run.capacity)
        elif admit.take:
            segment = self._contexts.pop(admit.context)
        else:
            segment = Segment.of(run.capacity)
            source = self._contexts[admit.context]
            assert admit.device_rows <= source.rows
            segment.data[:, :, : admit.device_rows] = source.data[:, :, : admit.device_rows]
        if not np.array_equal(segment.data[:, :, : admit.device_rows], text.rows(0, admit.device_rows)):
            raise WrongRow(f"job {run.job}: a device context with rows of other tokens")
        segment.rows = admit.device_rows
        return segment

    def _layer(self, part: Part, layer: int) -> None:
        run = part.run
        if part.failed is None:
            self._gather(part, layer)
        for save in part.saves:
            at = save.job_row - run.start
            rows = part.fresh[layer, :, at : at + save.rows]
            if part.failed is not None:  # what a model computes over rows that did not come
                rows = np.full_like(rows, 0xEE)
            self._store.save(save.draft, layer, save.slots, save.draft_row, rows[0], rows[1])
        part.segment.data[layer, :, run.start : run.start + len(run.tokens)] = part.fresh[layer]

    def _gather(self, part: Part, layer: int) -> None:
        at = part.gather_from
        arena = self._store.arena.rows
        for gather in part.run.gathers:
            if gather.move is not None and not self._store.wait_layer(gather.move, layer, self._patience):
                part.failed = gather.extent
                return
            count = gather.stop - gather.start
            rows = arena[layer][:, list(gather.slots)].reshape(2, -1, LAYOUT.row_bytes)[:, gather.start : gather.stop]
            wanted = part.text.rows(at, at + count)[layer]
            if not np.array_equal(rows, wanted):
                bad = int((rows != wanted).any(axis=(0, 2)).argmax())
                raise WrongRow(
                    f"job {part.run.job}, layer {layer}: row {gather.start + bad} of extent {gather.extent[:16]} is"
                    f" not row {at + bad} of the job's tokens"
                )
            part.segment.data[layer, :, at : at + count] = rows
            self.gathered += count
            at += count

    def _wait_in_lane(self, job: int, save: Save) -> None:
        lane = self._lanes.get(job)
        if lane is not None and (
            lane.save.draft != save.draft or lane.save.draft_row + lane.count != save.draft_row or save.rows != 1
        ):
            self._flush(job)
        lane = self._lanes.setdefault(job, Lane(save))
        lane.save = Save(save.draft, save.slots, lane.save.draft_row, lane.save.job_row, 1)
        lane.count += 1

    def _flush(self, job: int) -> None:
        lane = self._lanes.pop(job, None)
        if lane is not None:
            save = lane.save
            block = self.texts[job].rows(save.job_row, save.job_row + lane.count)
            self._store.save_block(save.draft, save.slots, save.draft_row, block)


# ---------------------------------------------------------------------------------------------------- world


@dataclass
class Asked:
    """A job as its caller sees it."""

    spec: JobSpec
    talk: Talk
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    told: Admitted | None = None

    @property
    def hits(self) -> int:
        assert self.told is not None
        return self.told.device + self.told.host + self.told.disk


class World:
    """One engine over one cache directory. Everything runs in the caller's thread but the store's own work."""

    def __init__(
        self,
        folder: Path,
        *,
        digest: str = DIGEST,
        host_slots: int = 96,
        device_rows: int = 1536,
        disk_bytes: int = 8 << 20,
        small_rows: int = 0,  # a damaged extent is to be one of several of its conversation
        policy: str = "lru",
        write_policy: str = "write_back",
        max_batch: int = 4,
        source: str = "load",
        timeout: float = TIMEOUT,
        patience: float = TIMEOUT,
    ) -> None:
        """Open the namespace and restore its extents, as `engine.setup` does. `timeout`: of the store's moves; `patience`: of a step that
        waits for a layer.

        Raises:
            StoreError: the namespace cannot be made or written.
            ConfigError: another process, version or layout has the namespace.
        """
        self.capacity = Capacity(device_rows, host_slots, disk_bytes, FILE_BYTES, EXTENT_ROWS, layers=LAYOUT.layers)
        self._bell = threading.Event()
        memory = mmap.mmap(-1, max(arena_bytes(LAYOUT, host_slots), 4096))
        np.frombuffer(memory, np.uint8)[:] = 0xCC
        namespace = Namespace.open(folder, "m", digest, LAYOUT)
        self.path = namespace.path
        try:
            self.store = KVStore(
                LAYOUT, host_slots, memory, namespace=namespace, notify=self._bell.set, read_timeout=timeout
            )
        except BaseException:
            namespace.close()
            raise
        self.journal: list[str] = []  # the plan's inputs
        self.scheduler = RecordingScheduler(
            self.capacity,
            SchedulerOptions(
                policy=policy,
                write_policy=write_policy,
                max_batch=max_batch,
                prefill_chunk=128,
                max_model_len=1200,
                digest=digest,
                source=source,
                small_rows=small_rows,
            ),
            self.journal.append,
        )
        self.runner = Runner(self.capacity, self.store, patience)
        self.flying: dict[int, tuple[Phase, Move]] = {}  # moves under way, and what they are part of
        self.started: list[tuple[Phase, Move]] = []
        self.failed_moves: list[tuple[Phase, Move, MoveDone]] = []
        self.asked: dict[int, Asked] = {}
        self._model = digest
        self.now = time.time()
        self._closed = False
        self._most = 1 << 60  # bytes of extents at the last look
        records = self.store.records()
        self.restored = len(records)
        self.useless = self.scheduler.restore(records, self.now)
        known = {f"{record.id}.safetensors" for record in records} - {
            f"{record.id}.safetensors" for record in self.useless
        }
        self._strangers = {file.name for file in (self.path / "extents").rglob("*.*")} - known
        self.scheduler.recall({kind: self.store.notes(kind) for kind in ("epoch", "session")})
        self.store.start([Drop(-1 - i, record.id, "unreachable") for i, record in enumerate(self.useless)])

    def later(self, seconds: float) -> None:
        """Time passes for the plan: a little in each step, and as it does while there is nothing to do. So a slow machine makes no other plan."""
        self.now += seconds

    # ------------------------------------------------------------------------------------------------ asking

    def submit(self, talk: Talk, new: int = 90, reply: int = 20) -> Asked:
        prompt = talk.prompt(new)
        spec = JobSpec(len(self.asked) + 1, pack(prompt), reply, salt=talk.salt)
        self.runner.texts[spec.job] = Text(talk.salt, prompt, self._model)
        job = self.asked[spec.job] = Asked(spec, talk)
        self.scheduler.submit(spec, self.now)
        return job

    def say(self, talk: Talk, new: int = 90, reply: int = 20) -> Asked:
        """The next turn of a conversation, to its end."""
        job = self.submit(talk, new, reply)
        self.until(lambda: job.finish is not None)
        return job

    def finish(self) -> None:
        """Run until no request waits."""
        self.until(lambda: not self.scheduler.unfinished)

    def settle(self, hung: bool = True) -> None:
        """Until every job, save and move has ended; but for calls that were given up, where some may be `hung`."""

        def settled() -> bool:
            rest = not self.scheduler.unfinished and self.store.at_rest()
            return rest and (hung or not self.store.stats().hung)

        self.until(settled, idle=True)

    def to_disk(self) -> None:
        """Everything to disk and nowhere else."""
        self.scheduler.drop_contexts()
        self.scheduler.flush(self.now)
        self.until(lambda: self.scheduler.flushed and self.store.at_rest(), idle=True)
        self.scheduler.drop_clean_host()
        self.settle()

    def until(self, done: Callable[[], bool], idle: bool = False, limit: float = LIMIT) -> None:
        """Steps until `done` (`idle`: and a step has nothing to do); raises `Hang` where that takes too long."""
        deadline = time.monotonic() + limit
        while True:
            self._bell.clear()
            if not idle and done():
                return
            if not self.step():
                if done():
                    return
                if time.monotonic() > deadline:
                    raise Hang(f"{self.scheduler.stats()}, {self.store.stats()}, under way: {self.flying}")
                self._bell.wait(IDLE_S)
                self.later(IDLE_S)
            elif time.monotonic() > deadline:
                raise Hang("it goes on for ever")

    def step(self) -> bool:
        """One iteration of the engine's loop; False when there is nothing to do."""
        self.later(STEP_S)
        done = self._completed()
        if done:
            self._take(self.scheduler.complete(done, self.now))
            self.scheduler.check()
        self._check_files()
        step = self.scheduler.schedule(self.now)
        self.scheduler.check()
        if step.idle:
            return False
        self.runner.release(step)
        self._start(step)
        result = self.runner.run(step)
        self._take(self.scheduler.commit(step, result, self._completed(), self.now))
        self.scheduler.check()
        return True

    def _start(self, step: Step) -> None:
        gathered = {gather.move for run in step.runs for gather in run.gathers}
        for move in step.moves:
            self.flying[move.move] = entry = (_phase(move, gathered), move)
            self.started.append(entry)
        self.store.start(step.moves)
        self.store.urge(step.urged)
        for number in step.urged:
            self.store.release(number)

    def _completed(self) -> list[TransferDone]:
        done = self.store.finished()
        for item in done:
            if isinstance(item, MoveDone):
                found = self.flying.pop(item.move, None)
                if found is not None and not item.ok:
                    self.failed_moves.append((*found, item))
        return done

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            job = self.asked[event.job]
            assert job.finish is None, "it had ended"
            if isinstance(event, Admitted):
                assert job.told is None, "told twice"
                job.told = event
                continue
            if event.token is not None:
                job.tokens.append(event.token)
            if event.finish is not None:
                job.finish = event.finish
                self._ended(job)

    def _ended(self, job: Asked) -> None:
        prompt = list(struct.unpack(f"<{len(job.spec.prompt) // 4}I", job.spec.prompt))
        assert job.finish == "length", f"job {job.spec.job} ended with {job.finish}"
        if job.tokens != answer(job.talk.salt, prompt, job.spec.max_tokens, self._model):
            raise WrongRow(f"job {job.spec.job} drew other tokens than without a cache")
        job.talk.tokens = prompt + job.tokens

    # --------------------------------------------------------------------------------------------- looking on

    def phases(self) -> list[tuple[Phase, Move]]:
        """List the moves under way and their phases; also for the store's threads."""
        while True:
            try:
                return list(self.flying.values())
            except RuntimeError:  # it changed meanwhile
                continue

    def _check_files(self) -> None:
        """Check that files, whole or half written, are within the budget at any time.

        Files that the plan never knew do not count: they go at the start. An excess after a start only shrinks.
        """
        sizes: dict[int, int] = {}
        for folder in os.scandir(self.path / "extents"):
            for file in os.scandir(folder) if folder.is_dir() else ():
                with contextlib.suppress(FileNotFoundError):
                    found = file.stat()
                    if file.name not in self._strangers:
                        sizes[found.st_ino] = found.st_size  # it may be renamed meanwhile, and be seen twice
        total = sum(sizes.values())
        assert total <= max(self.capacity.disk_bytes, self._most), (
            f"{total} bytes of files, {self.capacity.disk_bytes} allowed, there were {self._most};"
            f" the plan believes {self.scheduler.stats().disk_bytes}"
        )
        self._most = total

    def check_budgets(self) -> None:
        """At rest: what lies on disk is what both halves believe, and not more than allowed."""
        self.scheduler.check()
        found = sum(file.stat().st_size for file in (self.path / "extents").rglob("*") if file.is_file())
        assert found <= self.capacity.disk_bytes, (
            f"{found} bytes of extents on disk, {self.capacity.disk_bytes} allowed"
        )
        believed = self.scheduler.stats().disk_bytes
        assert found <= believed, f"{found} bytes of extents on disk, the plan believes {believed}"

    def close(self, flush: bool = True) -> None:
        """End in order; without `flush`, rows that are only in host are lost."""
        if self._closed:
            return
        self.settle()
        if flush:
            self.scheduler.flush(self.now)
            self.settle()
        self.store.touch(self.scheduler.cache.disk.take_touched())
        for kind, key, value in self.scheduler.cache.take_notes():
            self.store.note(kind, [(key, value)])
        self.abandon()

    def abandon(self) -> None:
        """End the threads, whatever they do."""
        if not self._closed:
            self._closed = True
            self.store.close()


def _phase(move: Move, gathered: set[int | None]) -> Phase:
    if isinstance(move, Load):
        return "load" if move.move in gathered else "prefetch"
    if isinstance(move, Store):
        return "save" if move.why in ("write_through", "flush") else "evict"
    return "evict"


# ---------------------------------------------------------------------------------------- the truth about files


def path_of(namespace: Path, talk: Talk) -> list[ExtentRecord]:
    """The extents on disk that hold a conversation's rows, in order, as the catalog has them."""
    tokens = pack(talk.tokens)
    found: list[ExtentRecord] = []
    rows = {record.id: record for record in admin.list_extents(namespace) if record.salt == talk.salt}
    stop: dict[str | None, int] = {None: 0}
    for _ in range(len(rows)):
        for record in sorted(rows.values(), key=lambda item: item.id):
            if record.parent in stop and record not in found:
                start = stop[record.parent]
                if tokens[4 * start : 4 * (start + record.rows)] == record.tokens:
                    stop[record.id] = start + record.rows
                    found.append(record)
    return found


def file_of(namespace: Path, extent: str) -> Path:
    return namespace / "extents" / extent[:2] / f"{extent}.safetensors"


def encode(record: ExtentRecord, contents: Bytes, digest: str = DIGEST) -> bytes:
    """The file of an extent with these contents (uint8 [layers, 2, rows, row_bytes])."""
    rows = record.rows
    padded = np.zeros((LAYOUT.layers, 2, LAYOUT.padded_rows(rows), LAYOUT.row_bytes), np.uint8)
    padded[:, :, :rows] = contents
    chunks = padded.reshape(LAYOUT.layers, 2, -1, LAYOUT.chunk_bytes)
    crcs = np.array([[[crc32c(chunk) for chunk in kv] for kv in layer] for layer in chunks], np.uint32)
    return encode_head(LAYOUT, digest, record, crcs) + padded.tobytes()


@dataclass
class Truth:
    """Holds the faults of a namespace, found without the store's own readers."""

    bad: set[str] = field(default_factory=set)  # files with a row whose bytes are not those of their name
    orphan: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    leftover: set[str] = field(default_factory=set)
    row: set[str] = field(default_factory=set)  # rows that are not what their (sound) file says
    good: set[str] = field(default_factory=set)
    catalog: bool = False


class Library:
    """Everything that has ever been said, so that any file's bytes can be foretold."""

    def __init__(self, talks: Iterable[Talk]) -> None:
        self._texts = [Text(talk.salt, talk.tokens) for talk in talks]

    def truth(self, namespace: Path, digest: str = DIGEST) -> Truth:
        truth = Truth()
        files = {}
        for file in sorted((namespace / "extents").rglob("*")):
            if file.is_file():
                name = file.name.removesuffix(".safetensors")
                if file.suffix == ".safetensors" and not name.startswith(".") and file.parent.name == name[:2]:
                    files[name] = file
                else:
                    truth.leftover.add(file.name)
        try:
            rows = read_catalog(namespace)
        except sqlite3.Error:
            rows, truth.catalog = {}, True
        for name, file in files.items():
            record = self._sound(file.read_bytes(), name, digest)
            if name not in rows and not truth.catalog:
                truth.orphan.add(name)
            elif record is None:
                truth.bad.add(name)
            else:
                truth.good.add(name)
                if not truth.catalog and rows[name] != facts_of(record):
                    truth.row.add(name)
        truth.missing = set(rows) - set(files)
        return truth

    def _sound(self, data: bytes, name: str, digest: str) -> ExtentRecord | None:
        """What a file is the file of, if its bytes are what they should be, to the last."""
        try:
            size = int.from_bytes(data[:8], "little")
            meta = json.loads(data[8 : 8 + size])["__metadata__"]
            rows = int(meta["rows"])
            own = data[8 + size : 8 + size + 4 * rows]
            record = ExtentRecord(
                name, meta["parent"] or None, int(meta["parent_rows"]), meta["salt"], "exact", own, len(data), 0.0
            )
        except (ValueError, KeyError, TypeError):
            return None
        for text in self._texts:
            whole = pack(text.tokens)
            at = whole.find(own) if text.salt == record.salt else -1
            while at >= 0:
                if at % 4 == 0 and extent_id(digest, text.salt, whole[:at], own) == name:
                    first = at // 4
                    wanted = encode(record, text.rows(first, first + rows), digest)
                    return record if wanted == data else None
                at = whole.find(own, at + 1)
        return None


def facts_of(record: ExtentRecord) -> tuple[Any, ...]:
    return (record.parent, record.parent_rows, record.salt, record.kind, record.tokens, record.file_bytes)


def read_catalog(namespace: Path) -> dict[str, tuple[Any, ...]]:
    """The catalog's rows, read with nothing but SQLite.

    The catalog is read in place beside the process that serves it, otherwise from a copy: opening a catalog that no process
    has open mends it, if it was left in the middle of a transaction.
    """
    with tempfile.TemporaryDirectory() as folder:
        if holder(namespace) is not None:
            return _rows(namespace / "catalog.sqlite")
        for file in namespace.glob("catalog.sqlite*"):
            if file.name in ("catalog.sqlite", "catalog.sqlite-wal"):
                shutil.copy(file, folder)
        return _rows(Path(folder) / "catalog.sqlite")


def _rows(catalog: Path) -> dict[str, tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(catalog)) as db:
        found = db.execute("SELECT id, parent, parent_rows, salt, kind, tokens, bytes FROM extents")
        return {row[0]: (*row[1:5], bytes(row[5] or b""), row[6]) for row in found}


# ------------------------------------------------------------------------------------------------- harm to files


def flip(file: Path, at: int, bit: int = 0x10) -> None:
    """One bit of a file, in place."""
    with open(file, "r+b") as handle:
        handle.seek(at)
        (old,) = handle.read(1)
        handle.seek(at)
        handle.write(bytes([old ^ bit]))


def place(part: str, rows: int) -> int:
    """An offset in the file of an extent of `rows` rows: in its header, or in the middle of keys or values."""
    if part == "header":
        return 8 + 150  # in the metadata
    return LAYOUT.offset(rows, 1, ("keys", "values").index(part)) + LAYOUT.row_bytes * (rows // 2) + 5


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Reads and writes go layer by layer, so that there is something between the first and the last call."""
    before = pieces.READ_BYTES, pieces.SUMMED_READ_BYTES, pieces.WRITE_BYTES
    pieces.READ_BYTES = pieces.SUMMED_READ_BYTES = pieces.WRITE_BYTES = 1  # type: ignore[misc]
    try:
        yield
    finally:
        pieces.READ_BYTES, pieces.SUMMED_READ_BYTES, pieces.WRITE_BYTES = before  # type: ignore[misc]
