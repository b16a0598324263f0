"""What one engine has to tell all others: events, such as a deletion, that each acts upon once, and facts that hold until they are
withdrawn, such as a pin.

Events are records in a folder for each hour, so that a look lists few, however many there were. An engine remembers in a file of its
own which it has seen: after a restart it catches up with what it has missed. What cannot be told now is told when the store answers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple

from afterglow.errors import RefusedError, StoreError
from afterglow.store.shared.records import LIVES_S, Records

log = logging.getLogger("afterglow.store")

Value = dict[str, Any]

EVENTS: Final = "events"
FACTS: Final = "facts"
FILE: Final = "shared-events.json"
HOUR_S: Final = 3600.0
SKEW_S: Final = 300.0  # that another engine's clock may differ
BEHIND_LOOK_S: Final = 60.0  # between looks for events of engines whose clocks are up to an hour behind
BEHIND_S: Final = HOUR_S + 2 * BEHIND_LOOK_S  # that these looks go back
LATE_S: Final = 60.0  # after which a change of a fact leaves what others have stated since
SAVE_S: Final = 60.0  # between two writes of the file where nothing has happened
MAX_UNTOLD: Final = 4096
MAX_LATE_FAILURES: Final = 8  # in one try of what could not be done before


class _Change(NamedTuple):
    """A change in the store that is still to be made. `about`: what those that keep their order are about; "": it waits for none."""

    work: Callable[[], object]
    about: str


class Notices:
    """Events and facts of all engines of one model. Every method may be called from any thread."""

    def __init__(self, records: Records, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """`folder`: where this engine remembers what it has seen; `clock`: seconds since 1970."""
        self._records = records
        self._file = folder / FILE
        self._clock = clock
        self._lock = threading.Lock()
        self._untold: deque[_Change] = deque()
        self._doing = threading.Lock()
        self._saving = threading.Lock()
        self._seen: dict[int, set[str]] = {}  # marks of events by hour
        self._until = 0.0  # events before that have been seen; 0: none is to be acted upon yet
        self._saved = self._went_back = float("-inf")
        self._facts: dict[str, Value] = {}  # by mark
        self._read_file()

    def tell(self, event: Mapping[str, Any]) -> None:
        """Tell all other engines of an event, now or when the store answers."""
        self.do(partial(self._tell, uuid.uuid4().hex, {**event, "at": self._clock()}))

    def state(self, fact: str, value: Mapping[str, Any]) -> None:
        """State a fact, in the place of an earlier value, now or when the store answers."""
        now = self._clock()
        self.do(partial(self._state, fact, {**value, "fact": fact, "at": now}, now), fact)

    def withdraw(self, fact: str, event: Mapping[str, Any]) -> None:
        """State a fact no more, and tell all others so: at once, and again when it could only be withdrawn later. Until then they find it
        stated."""
        now = self._clock()

        def work() -> None:
            self._state(fact, None, now)
            self._tell(name, {**event, "at": now})

        name = uuid.uuid4().hex
        if not self.do(work, fact):
            self.tell(event)

    def do(self, work: Callable[[], object], about: str = "") -> bool:
        """Change something in the store, now or when it answers; what is `about` the same in the order in which it was asked for. False:
        it was not done now.
        """
        if about not in self.waiting:
            try:
                work()
            except StoreError as error:
                log.warning("other servers learn later of a change that was made here: %s", error)
            else:
                return True
        with self._lock:
            full = len(self._untold) >= MAX_UNTOLD
            if not full:
                self._untold.append(_Change(work, about))
        if full:
            log.warning("the shared store does not answer: other servers will not learn of a change that was made here")
        return False

    @property
    def waiting(self) -> set[str]:
        """Return what changes that are still to be made are about."""
        with self._lock:
            return {change.about for change in self._untold} - {""}

    def do_late(self) -> None:
        """Do what could not be done before. What fails again has its next turn after the others. Raises: StoreError."""
        failed: list[StoreError] = []
        waits: set[int | str] = set()  # changes that have failed, and what they are about
        with self._doing:
            for change in [*self._untold]:
                if change.about in waits:
                    continue
                try:
                    change.work()
                except StoreError as error:
                    failed.append(error)
                    waits |= {id(change), *filter(None, (change.about,))}
                    if isinstance(error, RefusedError) or len(failed) == MAX_LATE_FAILURES:
                        break
                else:
                    with self._lock:
                        self._untold.remove(change)
            with self._lock:
                later = [id(change) in waits or change.about in waits for change in self._untold]
                parts = zip(later, self._untold, strict=True)
                self._untold = deque(change for _, change in sorted(parts, key=lambda each: each[0]))
        if failed:
            raise failed[0]

    def events(self) -> Iterator[Value]:
        """Yield the events that others have told, the earliest first. One counts as seen when the next is asked for. Raises: StoreError."""
        now = self._clock()
        found: list[tuple[int, str, Value]] = []
        until = self._until or now
        goes_back = now - self._went_back >= BEHIND_LOOK_S
        oldest = max(min(until, now) - BEHIND_S, now - LIVES_S[EVENTS])
        first = oldest if goes_back else max(min(until, now) - SKEW_S, oldest)
        for hour in range(int(first // HOUR_S), int((now + SKEW_S) // HOUR_S) + 1):
            new = self._records.marks(EVENTS, str(hour)) - self._seen.get(hour, set())
            read = self._records.load(EVENTS, str(hour), new) if new and self._until else {}
            found += [(hour, mark, event) for mark, event in read.items()]
            self._saw(hour, new - read.keys())
        for hour, mark, event in sorted(found, key=lambda each: float(each[2]["at"])):
            yield event
            self._saw(hour, {mark})
        with self._lock:
            self._seen = {hour: marks for hour, marks in self._seen.items() if hour >= int(oldest // HOUR_S)}
            self._until = now
            self._went_back = now if goes_back else self._went_back
        if found or now - self._saved >= SAVE_S:
            self.save()

    def _saw(self, hour: int, marks: set[str]) -> None:
        with self._lock:
            self._seen.setdefault(hour, set()).update(marks)

    def facts(self) -> dict[str, Value]:
        """Return all facts. Raises: StoreError."""
        latest = sorted(self._read_facts().values(), key=lambda value: float(value["at"]))
        return {str(value["fact"]): value for value in latest}

    def _read_facts(self) -> dict[str, Value]:
        """Return all facts by mark. Raises: StoreError."""
        known = self._facts  # another call may put one of its own in its place
        marks = self._records.marks(FACTS, "")
        new = self._records.load(FACTS, "", marks - known.keys())
        found = {mark: value for mark, value in (known | new).items() if mark in marks}
        self._facts = found
        return found

    def save(self) -> None:
        """Write down which events were seen."""
        with self._saving:
            with self._lock:
                text = json.dumps({"until": self._until, "seen": {hour: sorted(m) for hour, m in self._seen.items()}})
            self._saved = self._clock()
            new = self._file.with_name(f"{FILE}.new")
            with contextlib.suppress(OSError):  # events of the last hours are then acted upon again, or not at all
                new.write_text(text)
                os.replace(new, self._file)

    def _tell(self, name: str, event: Value) -> None:
        """Write an event in the folder of the hour that it is now, where others look, however late that is. Raises: StoreError."""
        hour = int(self._clock() // HOUR_S)
        self._saw(hour, {self._records.mark(str(hour), name)})
        self._records.put(EVENTS, str(hour), name, event)

    def _state(self, fact: str, value: Value | None, asked: float) -> None:
        """Write a fact under a name of its own, then remove its earlier values: all that are there, unless this comes late. `asked`: when a
        client asked for it. Raises: StoreError.
        """
        latest = asked + LATE_S if self._clock() - asked > LATE_S else inf
        values = self._read_facts().items()
        old = {mark for mark, other in values if other["fact"] == fact and float(other["at"]) <= latest}
        if value is not None:
            name = f"{fact}\n{asked}"
            self._records.put(FACTS, "", name, value)
            old.discard(self._records.mark("", name))  # an earlier try has written it
        for mark in old:
            self._records.drop(FACTS, "", mark)

    def _read_file(self) -> None:
        """Read which events were seen before a restart; without the file, those that are there count as seen."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            found = json.loads(self._file.read_text())
            seen = {int(hour): set(map(str, marks)) for hour, marks in found["seen"].items()}
            self._until, self._seen = float(found["until"]), seen
