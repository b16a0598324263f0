"""The journal: every input of the plan, one JSON object a line, and its replay. It knows no file: lines come and go.

The plan is a function of its inputs, so a journal replayed yields the same steps. That is how a simulator is held to
what an engine did, and how a bug seen once can be seen again. A `schedule` line carries a digest of its step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import inf
from typing import Any

from afterglow.plan.admission import Source
from afterglow.plan.extent import Capacity
from afterglow.plan.scheduler import Preload, Scheduler
from afterglow.plan.step import (
    Completion,
    Event,
    ExtentRecord,
    JobSpec,
    Lost,
    MoveDone,
    SaveDone,
    Step,
    StepResult,
    expanded,
)
from afterglow.plan.truncation import Cut

FORMAT = 1


class RecordingScheduler(Scheduler):
    """A scheduler that tells `write` of everything it is asked, before it does it."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        write: Callable[[str], object],
        **settings: Any,
    ) -> None:
        super().__init__(capacity, **settings)
        self._write = write
        self._note("plan", format=FORMAT, capacity=asdict(capacity), settings=settings)

    def _note(self, op: str, **values: Any) -> None:
        self._write(json.dumps({"op": op, **values}, separators=(",", ":")))

    def submit(self, spec: JobSpec, now: float) -> Cut | None:
        found = super().submit(spec, now)  # what is refused is no input
        values = asdict(spec) | {"prompt": spec.prompt.hex(), "stop_tokens": sorted(spec.stop_tokens)}
        self._note("submit", now=now, spec=values)
        return found

    def cancel(self, job: int, now: float) -> list[Event]:
        self._note("cancel", now=now, job=job)
        return super().cancel(job, now)

    def restore(self, records: Sequence[ExtentRecord], now: float) -> list[ExtentRecord]:
        listing = [asdict(record) | {"tokens": record.tokens.hex()} for record in records]
        self._note("restore", now=now, records=listing)
        return super().restore(records, now)

    def reset(self, now: float, whose: str | None = None) -> None:
        self._note("reset", now=now, tenant=whose)
        super().reset(now, whose)

    def recall(self, notes: Mapping[str, dict[str, str]]) -> None:
        self._note("recall", now=0, notes=dict(notes))
        super().recall(notes)

    def pin_session(self, tenant: str, name: str, pinned: bool) -> bool:
        found = super().pin_session(tenant, name, pinned)  # what is refused is no input
        self._note("pin_session", now=0, tenant=tenant, name=name, pinned=pinned)
        return found

    def forget_session(self, tenant: str, name: str) -> bool:
        self._note("forget_session", now=0, tenant=tenant, name=name)
        return super().forget_session(tenant, name)

    def register_prefix(self, salt: str, name: str, tokens: bytes, about: str, now: float) -> None:
        super().register_prefix(salt, name, tokens, about, now)  # what is refused is no input
        self._note("register_prefix", now=now, values=[salt, name, tokens.hex(), about])

    def forget_prefix(self, salt: str, name: str) -> bool:
        self._note("forget_prefix", now=0, values=[salt, name])
        return super().forget_prefix(salt, name)

    def baseline(self, preload: Preload, read_buffer: int | None, source: Source) -> None:
        self._note("baseline", now=0, values=[preload, read_buffer, source])
        super().baseline(preload, read_buffer, source)

    def drop_contexts(self) -> None:
        self._note("drop_contexts", now=0)
        super().drop_contexts()

    def drop_clean_host(self) -> None:
        self._note("drop_clean_host", now=0)
        super().drop_clean_host()

    def flush(self, now: float) -> None:
        self._note("flush", now=now)
        super().flush(now)

    def give_up(self) -> Lost:
        self._note("give_up", now=0)
        return super().give_up()

    def schedule(self, now: float, repeat_limit: int = 1) -> Step:
        digest = ""  # where it fails, a replay is to fail there too
        try:
            step = super().schedule(now, repeat_limit)
            digest = step_digest(step)
            return step
        finally:
            self._note("schedule", now=now, limit=repeat_limit, step=digest)

    def commit(self, step: Step, result: StepResult, done: Iterable[Completion], now: float) -> list[Event]:
        done = list(done)
        tokens, failed = list(result.tokens.items()), list(result.failed.items())
        values: dict[str, Any] = {"tokens": tokens, "failed": failed, "done": [_packed(item) for item in done]}
        if result.exhausted:
            values["exhausted"] = list(result.exhausted)
        if result.waiting:
            values["waiting"] = list(result.waiting)
        if result.late:
            values["late"] = list(result.late)
        if result.drawn:
            drawn = [[job, text.hex()] for job, text in result.drawn.items()]
            values |= {"repeats": result.repeats, "drawn": drawn}
        self._note("commit", now=now, **values)
        return super().commit(step, result, done, now)

    def complete(self, done: Iterable[Completion], now: float) -> list[Event]:
        done = list(done)
        self._note("complete", now=now, done=[_packed(item) for item in done])
        return super().complete(done, now)


def replay(
    lines: Iterable[str], look: Callable[[Scheduler], object] = lambda scheduler: None
) -> Iterator[tuple[Step, str]]:
    """The steps that a journal's inputs lead to, each with the digest of the step that was recorded (empty: it failed).
    After each input, `look` may look at the plan."""
    scheduler: Scheduler | None = None
    step: Step | None = None
    for number, line in enumerate(lines, 1):
        entry = _parsed(line, number)
        op = entry.pop("op")
        if op == "plan":
            scheduler = _start(entry)
            continue
        if scheduler is None:
            raise ValueError("a journal begins with a `plan` line")
        if op == "schedule":
            step = scheduler.schedule(entry["now"], entry.get("limit", 1))
            look(scheduler)
            yield step, entry["step"]
        else:
            _feed(scheduler, step, op, entry)
            look(scheduler)


def replay_repeated(lines: Iterable[str], limit: int) -> Iterator[tuple[Step, str]]:
    """The same of a journal whose steps were carried out once each, with as many as possible at once, at most `limit`:
    repeated steps are told one by one, as `expanded` has them."""
    scheduler: Scheduler | None = None
    step: Step | None = None
    entries = [_parsed(line, number) for number, line in enumerate(lines, 1)]
    at = 0
    while at < len(entries):
        entry = dict(entries[at])
        op = entry.pop("op")
        at += 1
        if op == "plan":
            scheduler = _start(entry)
        elif scheduler is None:
            raise ValueError("a journal begins with a `plan` line")
        elif op != "schedule":
            _feed(scheduler, step, op, entry)
        else:
            step = scheduler.schedule(entry["now"], limit)
            times = _times(entries, at - 1, step)
            if times < 2:
                yield replace(step, repeat=1), entry["step"]
                continue
            commits = entries[at : at + 2 * times : 2]
            drawn = {run.job: b"" for run in step.runs}
            for commit in commits:
                for job, token in commit["tokens"]:
                    drawn[job] += token.to_bytes(4, "little")
                for job, text in commit.get("drawn", ()):
                    drawn[job] += bytes.fromhex(text)
            result = StepResult({}, {}, times, drawn)
            recorded = [each["step"] for each in entries[at - 1 : at - 1 + 2 * times : 2]]
            yield from zip((each for each, _ in expanded(step, result)), recorded, strict=True)
            done = [_unpacked(dict(item)) for item in commits[-1]["done"]]
            scheduler.commit(step, result, done, commits[-1]["now"])
            at += 2 * times - 1


def _times(entries: list[dict[str, Any]], start: int, step: Step) -> int:
    """How many times a step was scheduled and committed from `start` on, with no other input before the last commit, and
    before the plan has to look again."""
    count = 0
    wake = step.wake_at if step.wake_at is not None else inf
    while count < step.repeat and start + 2 * count + 1 < len(entries):
        first, second = entries[start + 2 * count : start + 2 * count + 2]
        if first["op"] != "schedule" or second["op"] != "commit" or (count and first["now"] >= wake):
            break
        count += 1
        if second["done"]:
            break
    return count


def step_digest(step: Step) -> str:
    """Equal for equal steps, in any process."""
    return hashlib.blake2b(repr(step).encode(), digest_size=8).hexdigest()


def _parsed(line: str, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} of the journal is not JSON: {error}") from error
    if not isinstance(entry, dict) or "op" not in entry:
        raise ValueError(f"line {number} of the journal has no `op`: {line[:60]!r}")
    return entry


def _start(entry: dict[str, Any]) -> Scheduler:
    if entry["format"] != FORMAT:
        raise ValueError(f"this journal has format {entry['format']}; this program reads format {FORMAT}")
    sizes = entry["capacity"] | {"file_bytes": tuple(entry["capacity"]["file_bytes"])}
    return Scheduler(Capacity(**sizes), **entry["settings"])


def _feed(scheduler: Scheduler, step: Step | None, op: str, entry: dict[str, Any]) -> None:
    now = entry["now"]
    if op == "submit":
        values = entry["spec"]
        values |= {"prompt": bytes.fromhex(values["prompt"]), "stop_tokens": frozenset(values["stop_tokens"])}
        values["turns"], values["scores"] = tuple(values["turns"]), tuple(values["scores"])
        values["discard"] = tuple((start, stop) for start, stop in values["discard"])
        scheduler.submit(JobSpec(**values), now)
    elif op == "cancel":
        scheduler.cancel(entry["job"], now)
    elif op == "restore":
        records = [ExtentRecord(**item | {"tokens": bytes.fromhex(item["tokens"])}) for item in entry["records"]]
        scheduler.restore(records, now)
    elif op == "commit":
        assert step is not None
        scheduler.commit(step, _result(entry), [_unpacked(item) for item in entry["done"]], now)
    elif op == "complete":
        scheduler.complete([_unpacked(item) for item in entry["done"]], now)
    elif op == "reset":
        scheduler.reset(now, entry["tenant"])
    elif op == "pin_session":
        scheduler.pin_session(entry["tenant"], entry["name"], entry["pinned"])
    elif op == "forget_session":
        scheduler.forget_session(entry["tenant"], entry["name"])
    elif op == "register_prefix":
        salt, name, tokens, about = entry["values"]
        scheduler.register_prefix(salt, name, bytes.fromhex(tokens), about, now)
    elif op == "forget_prefix":
        scheduler.forget_prefix(*entry["values"])
    elif op == "recall":
        scheduler.recall(entry["notes"])
    elif op == "flush":
        scheduler.flush(now)
    elif op == "give_up":
        scheduler.give_up()
    elif op == "baseline":
        scheduler.baseline(*entry["values"])
    elif op == "drop_contexts":
        scheduler.drop_contexts()
    elif op == "drop_clean_host":
        scheduler.drop_clean_host()
    else:
        raise ValueError(f"a journal has no {op!r} lines")


def _result(entry: dict[str, Any]) -> StepResult:
    drawn = {job: bytes.fromhex(text) for job, text in entry.get("drawn", ())}
    exhausted = tuple(entry.get("exhausted", ()))
    waiting, late = tuple(entry.get("waiting", ())), tuple(entry.get("late", ()))
    failed = dict(entry["failed"])
    return StepResult(dict(entry["tokens"]), failed, entry.get("repeats", 1), drawn, exhausted, waiting, late)


def _packed(item: Completion) -> dict[str, Any]:
    return {"kind": type(item).__name__, **item._asdict()}


def _unpacked(item: dict[str, Any]) -> Completion:
    kind = item.pop("kind")
    return MoveDone(**item) if kind == "MoveDone" else SaveDone(**item)
