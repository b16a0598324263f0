"""The inputs of a plan as values: each is one call of a scheduler's method, and one line of a journal.

The fields of an input are the parameters of the method, in order. The names and values in a line are a part of the journal's
format: they stay as they are when methods and parameters are renamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from afterglow.choices import KVSource, Preload, ReadBuffer
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import ExtentRecord, JobSpec, MoveDone, SaveDone, SelectingPass, Step, StepResult, TransferDone
from afterglow.request import Breakpoint

Entry = dict[str, Any]  # a line of a journal


@dataclass(frozen=True, slots=True)
class Input:
    """One input. `method`: the scheduler's; also the `op` of its line."""

    method: ClassVar[str]

    def apply(self, scheduler: Scheduler) -> Any:
        """Give the input to a scheduler; returns what its method returns."""
        return getattr(scheduler, self.method)(*self.arguments())

    def arguments(self) -> list[Any]:
        """Return the method's arguments, in order."""
        return [getattr(self, each.name) for each in fields(self)]

    def entry(self) -> Entry:
        """Return what the journal's line holds besides `op`."""
        return {"now": 0, **{each.name: getattr(self, each.name) for each in fields(self)}}

    @classmethod
    def of(cls, entry: Entry) -> Input:
        """Make the input of a line."""
        return cls(*(entry[each.name] for each in fields(cls)))


@dataclass(frozen=True, slots=True)
class Submit(Input):
    method = "submit"
    spec: JobSpec
    now: float

    def entry(self) -> Entry:
        values = asdict(self.spec)
        values |= {"prompt": self.spec.prompt.hex(), "stop_tokens": sorted(self.spec.stop_tokens)}
        return {"now": self.now, "spec": values}

    @classmethod
    def of(cls, entry: Entry) -> Submit:
        values = dict(entry["spec"])
        values |= {"prompt": bytes.fromhex(values["prompt"]), "stop_tokens": frozenset(values["stop_tokens"])}
        values["turns"], values["scores"] = tuple(values["turns"]), tuple(values["scores"])
        values["discard"] = tuple((start, stop) for start, stop in values["discard"])
        values["breakpoints"] = tuple(Breakpoint(**each) for each in values.get("breakpoints", ()))
        return cls(JobSpec(**values), entry["now"])


@dataclass(frozen=True, slots=True)
class Cancel(Input):
    method = "cancel"
    job: int
    now: float


@dataclass(frozen=True, slots=True)
class Restore(Input):
    method = "restore"
    records: Sequence[ExtentRecord]
    now: float

    def entry(self) -> Entry:
        return {"now": self.now, "records": [asdict(each) | {"tokens": each.tokens.hex()} for each in self.records]}

    @classmethod
    def of(cls, entry: Entry) -> Restore:
        records = [ExtentRecord(**item | {"tokens": bytes.fromhex(item["tokens"])}) for item in entry["records"]]
        return cls(records, entry["now"])


@dataclass(frozen=True, slots=True)
class Adopt(Input):
    method = "adopt"
    salt: str
    tokens: bytes
    path: Sequence[Extent]
    ttl: float | None
    now: float

    def entry(self) -> Entry:
        path = [[each.id, each.kind, each.tokens.hex(), each.first_row, each.file_bytes] for each in self.path]
        return {"now": self.now, "salt": self.salt, "tokens": self.tokens.hex(), "path": path, "ttl": self.ttl}

    @classmethod
    def of(cls, entry: Entry) -> Adopt:
        salt, now = entry["salt"], entry["now"]
        path = [
            Extent(name, salt, kind, bytes.fromhex(tokens), first_row, size, now, 0)
            for name, kind, tokens, first_row, size in entry["path"]
        ]
        return cls(salt, bytes.fromhex(entry["tokens"]), path, entry["ttl"], now)


@dataclass(frozen=True, slots=True)
class Recall(Input):
    method = "recall"
    notes: Mapping[str, dict[str, str]]

    def entry(self) -> Entry:
        return {"now": 0, "notes": dict(self.notes)}


@dataclass(frozen=True, slots=True)
class Reset(Input):
    method = "reset"
    now: float
    whose: str | None = None

    def entry(self) -> Entry:
        return {"now": self.now, "tenant": self.whose}

    @classmethod
    def of(cls, entry: Entry) -> Reset:
        return cls(entry["now"], entry["tenant"])


@dataclass(frozen=True, slots=True)
class PinSession(Input):
    method = "pin_session"
    tenant: str
    name: str
    pinned: bool


@dataclass(frozen=True, slots=True)
class ForgetSession(Input):
    method = "forget_session"
    tenant: str
    name: str


@dataclass(frozen=True, slots=True)
class RegisterPrefix(Input):
    method = "register_prefix"
    salt: str
    name: str
    tokens: bytes
    about: str
    now: float

    def entry(self) -> Entry:
        return {"now": self.now, "values": [self.salt, self.name, self.tokens.hex(), self.about]}

    @classmethod
    def of(cls, entry: Entry) -> RegisterPrefix:
        salt, name, tokens, about = entry["values"]
        return cls(salt, name, bytes.fromhex(tokens), about, entry["now"])


@dataclass(frozen=True, slots=True)
class ForgetPrefix(Input):
    method = "forget_prefix"
    salt: str
    name: str

    def entry(self) -> Entry:
        return {"now": 0, "values": [self.salt, self.name]}

    @classmethod
    def of(cls, entry: Entry) -> ForgetPrefix:
        return cls(*entry["values"])


@dataclass(frozen=True, slots=True)
class Baseline(Input):
    method = "baseline"
    preload: Preload
    read_buffer: ReadBuffer
    source: KVSource

    def entry(self) -> Entry:
        return {"now": 0, "values": [self.preload, self.read_buffer, self.source]}

    @classmethod
    def of(cls, entry: Entry) -> Baseline:
        return cls(*entry["values"])


@dataclass(frozen=True, slots=True)
class DropContexts(Input):
    method = "drop_contexts"


@dataclass(frozen=True, slots=True)
class DropCleanHost(Input):
    method = "drop_clean_host"


@dataclass(frozen=True, slots=True)
class Flush(Input):
    method = "flush"
    now: float


@dataclass(frozen=True, slots=True)
class GiveUp(Input):
    method = "give_up"


@dataclass(frozen=True, slots=True)
class Schedule(Input):
    method = "schedule"
    now: float
    repeat_limit: int = 1
    guesses: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def entry(self) -> Entry:
        values: Entry = {"now": self.now, "limit": self.repeat_limit}
        return values | ({"guesses": list(self.guesses.items())} if self.guesses else {})

    @classmethod
    def of(cls, entry: Entry) -> Schedule:
        guesses = {job: tuple(tokens) for job, tokens in entry.get("guesses", ())}
        return cls(entry["now"], entry.get("limit", 1), guesses)


@dataclass(frozen=True, slots=True)
class Commit(Input):
    """The result of a step. `step`: the scheduler's open one, which a line does not hold."""

    method = "commit"
    step: Step | None
    result: StepResult
    done: Iterable[TransferDone]
    now: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "done", list(self.done))  # it is read twice

    def arguments(self) -> list[Any]:
        return [self.step, self.result, self.done, self.now]

    def apply(self, scheduler: Scheduler) -> Any:
        return scheduler.commit(self.step or scheduler.open_step, self.result, self.done, self.now)

    def entry(self) -> Entry:
        result = self.result
        tokens, failed = list(result.tokens.items()), list(result.failed.items())
        values: Entry = {"now": self.now, "tokens": tokens, "failed": failed, "done": _packed(self.done)}
        for name in ("exhausted", "waiting", "late"):
            if getattr(result, name):
                values[name] = list(getattr(result, name))
        for name in ("accepted", "selecting"):
            if getattr(result, name):
                values[name] = list(getattr(result, name).items())
        if result.drawn:
            drawn = [[job, text.hex()] for job, text in result.drawn.items()]
            values |= {"repeats": result.repeats, "drawn": drawn}
        return values

    @classmethod
    def of(cls, entry: Entry) -> Commit:
        drawn = {job: bytes.fromhex(text) for job, text in entry.get("drawn", ())}
        result = StepResult(
            dict(entry["tokens"]),
            dict(entry["failed"]),
            entry.get("repeats", 1),
            drawn,
            exhausted=tuple(entry.get("exhausted", ())),
            waiting=tuple(entry.get("waiting", ())),
            late=tuple(entry.get("late", ())),
            accepted=dict(entry.get("accepted", ())),
            selecting={job: SelectingPass(*told) for job, told in entry.get("selecting", ())},
        )
        return cls(None, result, unpacked(entry["done"]), entry["now"])


@dataclass(frozen=True, slots=True)
class Complete(Input):
    method = "complete"
    done: Iterable[TransferDone]
    now: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "done", list(self.done))  # it is read twice

    def entry(self) -> Entry:
        return {"now": self.now, "done": _packed(self.done)}

    @classmethod
    def of(cls, entry: Entry) -> Complete:
        return cls(unpacked(entry["done"]), entry["now"])


INPUTS: dict[str, type[Input]] = {
    kind.method: kind
    for kind in (
        Submit, Cancel, Restore, Adopt, Recall, Reset, PinSession, ForgetSession, RegisterPrefix, ForgetPrefix, Baseline,
        DropContexts, DropCleanHost, Flush, GiveUp, Schedule, Commit, Complete,
    )
}  # fmt: skip


def _packed(done: Iterable[TransferDone]) -> list[Entry]:
    return [{"kind": type(item).__name__, **item._asdict()} for item in done]


def unpacked(entries: Iterable[Entry]) -> list[TransferDone]:
    """Make the completions of a line."""
    found: list[TransferDone] = []
    for entry in entries:
        values = {name: value for name, value in entry.items() if name != "kind"}
        found.append(MoveDone(**values) if entry["kind"] == "MoveDone" else SaveDone(**values))
    return found
