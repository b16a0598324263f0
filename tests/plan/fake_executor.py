"""An executor without tensors: it carries steps out on *simulated contents*, so that every byte's identity is checked.

A row's content is a hash of its salt and all tokens up to it: exactly what its keys and values depend on. Device
segments, host slots and files hold such rows. Whatever a job gathers, copies or takes over must be the rows of its
own tokens, or an assertion fails here. Moves and saves take a random number of ticks, and may fail.
"""

from __future__ import annotations

import hashlib
import random
import struct
from dataclasses import dataclass, field

from afterglow.plan.options import Capacity
from afterglow.plan.prefix.salts import client_salt, is_private
from afterglow.plan.prefix.shared_prefixes import OPERATOR
from afterglow.plan.step import (
    Admit,
    Copy,
    Drop,
    ExtentRecord,
    JobSpec,
    Load,
    Move,
    MoveDone,
    RowsAhead,
    Run,
    Save,
    SaveDone,
    SelectingPass,
    Step,
    StepResult,
    Store,
    TransferDone,
)

Row = bytes
GARBAGE: Row = b"garbage"
VOCABULARY = 50


def pack(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack(tokens: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(tokens) // 4}I", tokens))


class Text:
    """A token string and the contents of its rows."""

    def __init__(self, salt: str, tokens: list[int]) -> None:
        self.start: Row = b"salt " + salt.encode()
        self.tenant = salt
        self.tokens: list[int] = []
        self.rows: list[Row] = []
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        self.rows.append(next_row(self.rows[-1] if self.rows else self.start, token))
        self.tokens.append(token)
        TENANT[self.rows[-1]] = self.tenant


@dataclass
class PrivateText:
    """A prompt that was cut. The content of its rows depends on how many could be kept, so only their tokens and their
    tenant are known; rows computed on top of kept rows are marked with the epoch, and no others are. The first `head` rows are those
    of any prompt of the tenant with these tokens."""

    salt: str
    tokens: list[int]
    head: int = 0

    def __post_init__(self) -> None:
        self.exact = Text(client_salt(self.salt), self.tokens[: self.head]).rows

    def append(self, token: int) -> None:
        self.tokens.append(token)

    def compute(self, before: list[Row], tokens: list[int]) -> list[Row]:
        rows = list(before)
        for token in tokens:
            if len(rows) < self.head:
                rows.append(self.exact[len(rows)])
                continue
            rows.append(next_row(b"epoch " + self.salt.encode() + (rows[-1] if rows else b""), token))
            TENANT[rows[-1]] = client_salt(self.salt)
        return rows[len(before) :]


TOKEN: dict[Row, int] = {}  # of every row there ever was
TENANT: dict[Row, str] = {}


def next_row(before: Row, token: int) -> Row:
    row = hashlib.blake2b(before + token.to_bytes(4, "little"), digest_size=8).digest()
    TOKEN[row] = token
    return row


def sample(row: Row) -> int:
    """The model: the next token is a function of all tokens before."""
    return int.from_bytes(row, "little") % VOCABULARY


def answer(spec: JobSpec, max_model_len: int) -> tuple[list[int], str]:
    """What the job generates when nothing is cached, and how it ends."""
    text = Text(spec.salt, unpack(spec.prompt))
    made: list[int] = []
    while len(made) < spec.max_tokens:
        made.append(sample(text.rows[-1]))
        text.append(made[-1])
        if made[-1] in spec.stop_tokens:
            return made, "stop"
        if len(text.tokens) >= max_model_len:
            break
    return made, "length"


@dataclass
class Faults:
    """Chances per move or save, and how long they take (ticks, at most)."""

    load: float = 0.0
    store: float = 0.0
    save: float = 0.0
    drop: float = 0.0
    busy: float = 0.5  # of failed loads and stores: the call hangs on, and a load writes garbage later
    why: str = "damage"  # of failed loads, in the store's words
    delay: int = 3
    late: float = 0.0  # of passes that need a load that has not ended: others are not to wait for it
    exhausted: float = 0.0  # of steps: the device has no memory for the last runs
    lazy_saves: float = 0.5
    seconds: float = 1.0  # that a load says it took, for a block


@dataclass
class Segment:
    """Rows on the device. `shown`: those that layers with a window hold; they have given up the rows before `first`. `pages`: full
    pages that it shares or may share, by identity, where segments do."""

    rows: list[Row]
    capacity: int
    first: int = 0
    shown: frozenset[int] = frozenset()
    pages: list[object] = field(default_factory=list)

    def beginning(self, rows: int, capacity: int, page: int = 1) -> Segment:
        """The first rows, in room for `capacity`. `page`: rows of a page; whole pages are the same."""
        shown = frozenset(row for row in self.shown if row < rows)
        return Segment(self.rows[:rows], capacity, self.first, shown, self.pages[: rows // page])


@dataclass
class Pending:
    move: Move
    ticks: int
    content: list[Row] = field(default_factory=list)


@dataclass
class Tee:
    job: int
    save: Save
    rows: list[Row]


class FakeExecutor:
    """Device, host and disk of one engine. `files` and `catalog` survive a restart. `window`: rows that a query sees in some
    layers (0: all rows in all layers)."""

    def __init__(
        self, capacity: Capacity, rng: random.Random, faults: Faults, window: int = 0, shared_pages: bool = False
    ) -> None:
        self.window = window
        self.shares = shared_pages
        self.lacking: set[int] = set()  # slots whose rows are not there in layers with a window
        self.skipped = 0  # blocks
        self.capacity = capacity
        self.rng = rng
        self.faults = faults
        self.texts: dict[int, Text | PrivateText] = {}
        self.segments: dict[int, Segment] = {}
        self.contexts: dict[int, Segment] = {}
        self.slots: list[list[Row]] = [[GARBAGE] * capacity.block_rows for _ in range(capacity.host_slots)]
        self.files: dict[str, list[Row]] = {}
        self.catalog: dict[str, ExtentRecord] = {}
        self.damaged: set[str] = set()  # files that cannot be read, whatever the chances
        self.most = 0  # bytes on disk: the budget, or what a restart found
        self.pending: dict[int, Pending] = {}
        self.hung: dict[int, Pending] = {}
        self.tees: list[Tee] = []
        self.failed: set[int] = set()  # loads
        self.hurried: set[int] = set()
        self.done: list[TransferDone] = []
        self.void = 0  # rows of wrong guesses
        self.selecting_seconds = 0.0  # that passes take which select; 0: they do not say
        self.selecting_bytes = 0  # that these read
        self.selecting_waits = 0.0  # seconds, that they wait for it
        self.kept: set[int] = set()  # slots that may be read ahead of a job's turn
        self.read_ahead: RowsAhead | None = None  # what the last step named
        self.ahead = {"foreseen": 0, "other": 0}  # jobs that joined when their rows were read ahead
        self.gathered = {"device": 0, "host": 0, "computed": 0, "fellow": 0}

    @property
    def busy(self) -> bool:
        return bool(self.pending or self.hung or self.tees or self.done)

    def submit(self, spec: JobSpec, head: int = 0) -> None:
        """Take in a job; of a prompt that was cut, the first `head` rows are exact."""
        tokens = unpack(spec.prompt)
        private = is_private(spec.salt)
        self.texts[spec.job] = PrivateText(spec.salt, tokens, head) if private else Text(spec.salt, tokens)

    # ------------------------------------------------------------------------------------------- a step

    def execute(self, step: Step) -> StepResult:
        self._look_ahead(step)
        for release in step.releases:
            for tee in [tee for tee in self.tees if tee.job == release.job]:
                self._write(tee)
            segment = self.segments.pop(release.job)
            if release.context is not None:
                assert 0 < release.rows <= len(segment.rows)
                capacity = self.capacity.round_up(release.rows) if self.shares else segment.capacity
                context = segment.beginning(release.rows, capacity)
                context.pages = segment.pages[: self.capacity.blocks(release.rows)]
                self.contexts[release.context] = context
        for number in step.frees:
            del self.contexts[number]
        for move in step.moves:
            self._start(move)
        self.hurried.update(step.urged)
        late: list[int] = []
        fit = len(step.runs)
        if step.runs and self.faults.exhausted and self.rng.random() < self.faults.exhausted:
            fit = self.rng.randrange(fit)
        void = step.runs[fit:]
        result = StepResult({}, {}, exhausted=[run.job for run in void], late=late)
        assert len({run.job for run in step.runs}) == len(step.runs)
        for run in step.runs:
            if run.admit is not None:
                self._admit(run, run.admit)
        for run in step.runs[:fit]:
            self._run(run, result, late)
            self._check_device()
        for run in void:
            self._give_up(run)
        return result

    def _look_ahead(self, step: Step) -> None:
        """What is read ahead are rows of the job's own, which stay where they are."""
        before, ahead = self.read_ahead, step.ahead
        for run in step.runs:
            if before is not None and run.job == before.job and run.admit is not None:
                first = run.start - sum(gather.stop - gather.start for gather in run.gathers)
                self.ahead["foreseen" if before.ends_with(first, run.gathers) else "other"] += bool(run.gathers)
        self.read_ahead, self.kept = ahead, set()
        if ahead is None:
            return
        text, size = self.texts[ahead.job], self.capacity.block_rows
        assert ahead.job not in {run.job for run in step.runs}
        assert 0 < ahead.layers <= self.capacity.layers
        assert ahead.layers * self.capacity.round_up(ahead.rows) <= self.capacity.read_buffer_rows
        assert all(gather.move is None for gather in ahead.gathers)
        found = [self._read(each.slots)[row] for each in ahead.gathers for row in range(each.start, each.stop)]
        place = slice(ahead.first, ahead.first + ahead.rows)
        assert [TOKEN[row] for row in found] == text.tokens[place]
        assert isinstance(text, PrivateText) or found == text.rows[place]
        self.kept = {each.slots[row // size] for each in ahead.gathers for row in range(each.start, each.stop)}

    def _give_up(self, run: Run) -> None:
        segment = self.segments[run.job]
        segment.rows = [GARBAGE] * len(segment.rows)
        segment.shown = frozenset()
        self.tees += [Tee(run.job, save, []) for save in run.saves]  # written to for a while yet

    def _check_device(self) -> None:
        segments = [*self.segments.values(), *self.contexts.values()]
        held, size = self.capacity.held, self.capacity.block_rows
        if self.shares:
            for segment in segments:
                while len(segment.pages) * size < segment.capacity:
                    segment.pages.append(object())
                del segment.pages[segment.capacity // size :]
            pages = len({page for segment in segments for page in segment.pages})
            last = held.windowed * sum(min(segment.capacity, held.most) for segment in segments)
            taken = (held.layers - held.windowed) * pages * size + last
            assert taken <= held.layers * self.capacity.device_rows
        else:
            assert sum(held.cost(segment.capacity) for segment in segments) <= self.capacity.device_rows
        assert all(len(segment.rows) <= segment.capacity for segment in segments)

    def _run(self, run: Run, result: StepResult, late: list[int]) -> None:
        text = self.texts[run.job]
        if run.admit is not None and run.admit.selectable and self.selecting_seconds:
            result.selecting[run.job] = SelectingPass(
                self.selecting_seconds, self.selecting_bytes, self.selecting_waits
            )
        if self.window:
            self._make_room(run)
        failed = self._gather(run, late)
        if failed is not None:
            result.failed[run.job] = failed
            self._give_up(run)
            return
        segment = self.segments[run.job]
        assert run.capacity >= segment.capacity
        segment.capacity = run.capacity
        assert len(segment.rows) == run.start
        if self.window:
            self._see(run, segment)
        own, guessed = list(run.tokens[: run.own]), list(run.tokens[run.own :])
        stop = run.start + run.own
        assert own == text.tokens[run.start : stop]
        assert own
        assert stop + len(guessed) <= run.capacity
        if isinstance(text, PrivateText):
            assert [TOKEN[row] for row in segment.rows] == text.tokens[: run.start], "rows of other tokens"
            assert segment.rows[: text.head] == text.exact[: len(segment.rows)], "the first rows are others"
            assert {TENANT[row] for row in segment.rows} <= {client_salt(text.salt), OPERATOR}, "rows of another tenant"
            segment.rows += text.compute(segment.rows, own)
        else:
            assert segment.rows == text.rows[: run.start], "rows that are not the job's own"
            segment.rows += text.rows[run.start : stop]
        self.gathered["computed"] += len(run.tokens)
        right = 0
        while right < len(guessed) and sample(segment.rows[-1]) == guessed[right]:
            segment.rows += self._rows(text, segment.rows, guessed[right])
            text.append(guessed[right])
            right += 1
        if right:
            result.accepted[run.job] = right
            stop += right
        void = len(guessed) - right
        self.void += void
        for save in run.saves:
            save = save._replace(rows=save.rows - void)  # rows of wrong guesses are neither saved nor answered
            assert run.start <= save.job_row
            assert save.job_row + save.rows <= stop
            tee = Tee(run.job, save, segment.rows[save.job_row : save.job_row + save.rows])
            self.tees.append(tee)
            if self.rng.random() > self.faults.lazy_saves:
                self._write(tee)
        if run.sample:
            assert stop == len(text.tokens)
            token = sample(segment.rows[-1])
            result.tokens[run.job] = token
            text.append(token)

    def _make_room(self, run: Run) -> None:
        """Layers with a window give up rows for the run's."""
        segment = self.segments[run.job]
        segment.first = max(segment.first, self.capacity.held.first(run.start + len(run.tokens)))
        segment.shown = frozenset(row for row in segment.shown if row >= segment.first)

    def _see(self, run: Run, segment: Segment) -> None:
        """All that windows show the run's rows is there, and there is room for them."""
        before, stop = max(0, run.start + 1 - self.window), run.start + len(run.tokens)
        assert segment.shown.issuperset(range(before, run.start)), "rows that a window shows are not there"
        held = self.capacity.held
        assert stop - segment.first <= min(segment.capacity, held.most if held.windowed else stop)
        segment.shown |= frozenset(range(run.start, stop))

    def _rows(self, text: Text | PrivateText, before: list[Row], token: int) -> list[Row]:
        """The row of a token behind these rows."""
        return text.compute(before, [token]) if isinstance(text, PrivateText) else [next_row(before[-1], token)]

    def foresee(self, job: int, count: int) -> list[int]:
        """What a decoding job is going to draw."""
        text, rows = self.texts[job], list(self.segments[job].rows)
        tokens: list[int] = []
        token = text.tokens[len(rows)]
        while len(tokens) < count:
            rows += self._rows(text, rows, token)
            token = sample(rows[-1])
            tokens.append(token)
        return tokens

    def _admit(self, run: Run, admit: Admit) -> None:
        assert run.job not in self.segments
        segment = Segment([], run.capacity)
        if admit.context is not None:
            context = self.contexts.pop(admit.context) if admit.take else self.contexts[admit.context]
            assert admit.device_rows <= len(context.rows)
            segment = context.beginning(admit.device_rows, run.capacity, self.capacity.block_rows)
            if admit.take and not self.shares:
                assert run.capacity >= context.capacity
        elif admit.fellow is not None:
            fellow = self.segments[admit.fellow]
            assert self.shares
            assert admit.device_rows <= len(fellow.rows)
            segment = fellow.beginning(admit.device_rows, run.capacity, self.capacity.block_rows)
            self.gathered["fellow"] += len(segment.rows)
        else:
            assert admit.device_rows == 0
        self.gathered["device"] += len(segment.rows)
        if admit.selectable:  # the important ones stand for all
            segment.rows = list(self.texts[run.job].rows[: run.start])
        self.segments[run.job] = segment

    def _gather(self, run: Run, late: list[int]) -> str | None:
        segment = self.segments[run.job]
        rows, size = segment.rows, self.capacity.block_rows
        shown = []  # windows show no query the rows before, and nothing of them is copied
        for gather in run.gathers:
            if gather.move is not None and gather.move in self.pending:
                if self.faults.late and self.rng.random() < self.faults.late:
                    late.append(run.job)
                    return gather.extent
                self._end(gather.move)
            if gather.move in self.failed:
                return gather.extent
            content = self._read(gather.slots)
            for row in range(gather.start, gather.stop):
                if len(rows) > run.start - self.window and gather.slots[row // size] not in self.lacking:
                    shown.append(len(rows))
                rows.append(content[row])
            self.gathered["host"] += gather.stop - gather.start
        segment.shown |= frozenset(shown)
        return None

    # ------------------------------------------------------------------------------------- host and disk

    def _read(self, slots: tuple[int, ...]) -> list[Row]:
        return [row for slot in slots for row in self.slots[slot]]

    def _put(self, slots: tuple[int, ...], first: int, rows: list[Row]) -> None:
        size = self.capacity.block_rows
        self.lacking -= set(slots)
        assert not self.kept.intersection(slots[(first + i) // size] for i in range(len(rows))), "it is being read"
        for i, row in enumerate(rows, first):
            self.slots[slots[i // size]][i % size] = row

    def _write(self, tee: Tee) -> None:
        self.tees.remove(tee)
        save = tee.save
        ok = bool(tee.rows) and self.rng.random() >= self.faults.save
        self._put(save.slots, save.draft_row, tee.rows if ok else [GARBAGE] * save.rows)
        last = self.done[-1] if self.done else None
        if isinstance(last, SaveDone) and last.draft == save.draft and last.first_row + last.rows == save.draft_row:
            if last.ok == ok:  # in any grouping
                self.done[-1] = SaveDone(save.draft, last.first_row, last.rows + save.rows, ok)
                return
        self.done.append(SaveDone(save.draft, save.draft_row, save.rows, ok))

    def _start(self, move: Move) -> None:
        pending = Pending(move, self.rng.randint(0, self.faults.delay))
        if isinstance(move, Load):
            assert len(move.slots) == self.capacity.blocks(move.rows)
            pending.content = list(self.files[move.extent])
            assert 0 <= move.skip <= len(move.slots)
            self._put(move.slots, 0, [GARBAGE] * move.rows)  # a slot that is loaded must have no other owner
        elif isinstance(move, Store):
            record = move.record
            assert record.id not in self.files, "a file of that name is there"
            assert not any(isinstance(p.move, Store) and p.move.record.id == record.id for p in self.pending.values())
            assert not self.lacking.intersection(move.slots), "a copy that lacks rows is written"
            pending.content = self._read(move.slots)[: record.rows]
            assert [TOKEN[row] for row in pending.content] == unpack(record.tokens), "not the rows of these tokens"
        elif isinstance(move, Copy):
            rows = [row for slots, a, b in move.pieces for row in self._read(slots)[a:b]]
            size = self.capacity.block_rows
            read = {slots[row // size] for slots, a, b in move.pieces for row in range(a, b)}
            assert not self.lacking & read, "rows that are lacking are copied"
            assert len(rows) == move.rows
            assert len(move.slots) == self.capacity.blocks(move.rows)
            assert not {slot for slots, _, _ in move.pieces for slot in slots} & set(move.slots)
            pending.content = rows
        self.pending[move.move] = pending
        self._check_disk()

    def _check_disk(self) -> None:
        """Files of calls that hang count as well. What a restart found above the budget only goes."""
        calls = [*self.pending.values(), *self.hung.values()]
        written = sum(p.move.record.file_bytes for p in calls if isinstance(p.move, Store))
        stored = sum(record.file_bytes for record in self.catalog.values())
        assert stored + written <= max(self.capacity.disk_bytes, self.most), "the disk budget"
        self.most = stored + written

    def _end(self, number: int) -> None:
        pending = self.pending.pop(number)
        move = pending.move
        if isinstance(move, Load):
            seconds = self.capacity.blocks(move.rows) * self.faults.seconds
            if move.most_s is not None and seconds > move.most_s and number not in self.hurried:
                part = int(self.capacity.file_size(move.rows) * move.most_s / seconds)
                self.failed.add(number)
                self._put(move.slots, 0, [GARBAGE] * move.rows)
                self.done.append(MoveDone(number, ok=False, bytes=part, seconds=move.most_s, why="slow"))
                return
            if self.rng.random() < self.faults.load or move.extent in self.damaged:
                busy = self.rng.random() < self.faults.busy
                if busy:
                    self.hung[number] = Pending(move, self.rng.randint(1, 5))
                self.failed.add(number)
                why = "damage" if move.extent in self.damaged else self.faults.why
                self.done.append(MoveDone(number, ok=False, slots_busy=busy, error="failed", why=why))
                return
            self._put(move.slots, 0, pending.content)
            assert not move.skip or self.window
            self.lacking |= set(move.slots[: move.skip])
            self.skipped += move.skip
        elif isinstance(move, Store):
            assert self._read(move.slots)[: move.record.rows] == pending.content, "slots changed while being stored"
            if self.rng.random() < self.faults.store:
                busy = self.rng.random() < self.faults.busy
                if busy:
                    self.hung[number] = Pending(move, self.rng.randint(1, 5))
                self.done.append(MoveDone(number, ok=False, slots_busy=busy, error="no space"))
                return
            self.files[move.record.id] = pending.content
            self.catalog[move.record.id] = move.record
        elif isinstance(move, Copy):
            again = [row for slots, a, b in move.pieces for row in self._read(slots)[a:b]]
            if again != pending.content:  # then no job may use the copy
                pending.content = [GARBAGE] * move.rows
            if self.rng.random() < self.faults.store:
                self.done.append(MoveDone(number, ok=False, error="gone"))
                return
            self._put(move.slots, 0, pending.content)
        else:
            assert isinstance(move, Drop)
            if self.rng.random() < self.faults.drop:
                self.done.append(MoveDone(number, ok=False, error="cannot be removed"))
                return
            self.damaged.discard(move.extent)
            del self.files[move.extent]
            del self.catalog[move.extent]
        rows = move.rows if isinstance(move, Load) else 0
        seconds = self.capacity.blocks(rows) * self.faults.seconds
        size = self.capacity.file_size(rows) if rows else 0
        if isinstance(move, Load):
            size -= move.skip * self.capacity.window_block_bytes
        self.done.append(MoveDone(number, ok=True, bytes=size, seconds=seconds))

    def tick(self) -> list[TransferDone]:
        """Let time pass; returns the completions since the last tick."""
        for number, pending in list(self.pending.items()):
            pending.ticks -= 1
            if pending.ticks < 0:
                self._end(number)
        for number, pending in list(self.hung.items()):
            pending.ticks -= 1
            if isinstance(pending.move, Load):
                self._put(pending.move.slots, 0, [GARBAGE] * pending.move.rows)
            if pending.ticks < 0:
                del self.hung[number]
                self.done.append(MoveDone(number, ok=False))
        for tee in list(self.tees):
            if self.rng.random() < 0.3:
                self._write(tee)
        done, self.done = self.done, []
        return done
