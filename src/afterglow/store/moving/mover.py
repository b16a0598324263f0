"""Threads and queues that carry moves out, in order of priority. They know tasks, not extents or files.

Six promises. Tasks of one key run one after another, in the order of submission, whatever their priorities.
Tasks that write, or read ahead of need, never hold the last thread, so that nothing urgent waits for them. A task that has come to its gate
holds no thread while the gate is closed. Urgent tasks that come together, or are urged together, go on side by side
where their work pauses: whichever has come the least far goes first. A task that stops making progress is given up:
it is reported as failed with its memory still busy, another thread takes its place, and when the call returns at
last a second report says that the memory is free. Until then tasks of its key are refused, so that the late call
changes nothing newer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Final

from afterglow.errors import StoreError
from afterglow.plan.step import DEMAND, MoveDone
from afterglow.store.faults import kind_of
from afterglow.store.moving.task import Place, Task

log = logging.getLogger("afterglow.store")

MAX_REPLACEMENTS: Final = 4  # threads started for hung ones; when all threads hang, the tier counts as gone


class Mover:
    """Runs tasks in threads. They call `report(task, done, kind)`, once or (time-outs) twice per task with a move;
    `kind` is the counter's name of the error when the task failed.
    """

    def __init__(self, threads: int, timeout: float, report: Callable[[Task, MoveDone, str | None], None]) -> None:
        self._normal = max(1, threads)
        self._patient_most = max(1, threads - 1)
        self._timeout = timeout
        self._report = report
        self._lock = threading.Lock()
        self._work_there = threading.Condition(self._lock)
        self._watch = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._queue: list[tuple[Place, Task]] = []
        self._patient_queue: list[tuple[Place, Task]] = []  # of tasks that leave a thread to others
        self._chains: dict[str, deque[Task]] = {}  # by key; the first is queued or runs, the rest wait for it
        self._running: dict[Task, None] = {}
        self._stuck: set[str] = set()  # keys of tasks that were given up and have not returned
        self._patient = 0  # that run
        self._alive = 0
        self.hung = 0  # threads that sit in a call that timed out
        self._reporting = 0  # threads between the end of a task and its report
        self._number = 0
        self._closed = False
        with self._lock:
            for _ in range(self._normal):
                self._spawn()
        threading.Thread(target=self._watchdog, name="afterglow-watchdog", daemon=True).start()

    # ------------------------------------------------------------------------------------------ from outside

    def submit(self, *tasks: Task) -> None:
        """Queue tasks, the urgent ones (DEMAND) to go on side by side; tasks that no thread is left for fail at once."""
        refused: list[tuple[Task, str]] = []
        with self._lock:  # all at once: the first one is to know that others wait
            together = self._next()
            for task in tasks:
                why = "the store is closed" if self._closed else self._hangs(task.key)
                if why is not None:
                    refused.append((task, why))
                    continue
                task.turn = together if task.priority == DEMAND else self._next()
                self._chains.setdefault(task.key, deque()).append(task)
                self._enqueue(task.key)
        for task, why in refused:
            self._refuse(task, why)

    def release(self, task: Task) -> None:
        """Open a task's gate. No effect where there is none."""
        with self._lock:
            task.gate = None
            self._enqueue(task.key)

    def arrived(self, task: Task, layers: int | None) -> None:
        """Let a task read so many layers, whose bytes have come to the disk meanwhile (None: all have)."""
        with self._lock:
            task.arrived = layers
            self._enqueue(task.key)

    def urge(self, tasks: Sequence[Task]) -> None:
        """Give all these tasks, which a request waits for, the priority DEMAND; they go on side by side."""
        with self._lock:
            together = min((task.turn for task in tasks if task.priority == DEMAND), default=self._next())
            for task in tasks:
                task.priority, task.turn = DEMAND, together
                self._enqueue(task.key)

    def crowded(self, task: Task) -> bool:
        """Tell whether a task is queued that should not wait until the running `task` has ended: one that is as urgent and
        of the same turn, or more urgent.
        """
        return self._ahead(task, 2)

    def overtaken(self, task: Task) -> bool:
        """Tell whether a task is queued that goes before the rest of the running `task`."""
        return self._ahead(task, 3)

    def pending(self) -> int:
        """Count the tasks that are queued, run, or wait at their gates; given-up ones do not count."""
        with self._lock:
            return sum(len(chain) for chain in self._chains.values()) + self._reporting

    def close(self, timeout: float) -> None:
        """Refuse tasks that are queued or come to a gate, let running ones end (for at most `timeout` seconds), and end
        the threads.
        """
        with self._lock:
            self._closed = True
            refused = self._empty_queues()
            self._work_there.notify_all()
            self._watch.notify_all()
        for task in refused:
            self._refuse(task, "the store is closed")
        with self._lock:
            self._idle.wait_for(lambda: self._alive == self.hung, timeout)
            stuck = list(self._running)
            late = [other for task in stuck for other in self._set_aside(task)]
        for task in stuck:
            task.end(False)
        for task in late:
            self._refuse(task, "the store is closed")

    def _ahead(self, task: Task, parts: int) -> bool:
        with self._lock:
            heap = self._heap()
            if not heap or task.key not in self._chains:
                return False
            return heap[0][0][:parts] <= (*self._urgency(task.key), task.layers)[:parts]

    # ------------------------------------------------------------------------------- below: the lock is held

    @property
    def _gone(self) -> bool:
        return self.hung > 0 and self.hung == self._alive

    def _hangs(self, key: str) -> str | None:
        """Return why a task of this key cannot be taken now; None: it can."""
        if self._gone:
            return "the disk does not answer"
        return "an earlier call hangs" if key in self._stuck else None

    def _spawn(self) -> None:
        self._alive += 1
        threading.Thread(target=self._worker, name="afterglow-mover", daemon=True).start()

    def _enqueue(self, key: str) -> None:
        """Queue the first task of a key, unless it runs or its gate is closed: as urgent as the most urgent that waits
        for it.
        """
        chain = self._chains.get(key)
        if not chain or chain[0].started or chain[0].waits:
            return
        first, urgency = chain[0], self._urgency(key)
        if first.place is None or urgency < first.place[:2]:
            first.place = (*urgency, first.layers, self._next())
            heappush(self._patient_queue if first.can_wait else self._queue, (first.place, first))
            self._work_there.notify()

    def _urgency(self, key: str) -> tuple[int, int]:
        return min((task.priority, task.turn) for task in self._chains[key])

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _heap(self) -> list[tuple[Place, Task]]:
        """Return the queue whose first entry is next."""
        for heap in (self._queue, self._patient_queue):
            while heap and heap[0][0] != heap[0][1].place:  # a more urgent entry of the same task took its place
                heappop(heap)
        heap, patient = self._queue, self._patient_queue
        if patient and self._patient < self._patient_most and (not heap or patient[0] < heap[0]):
            heap = patient
        return heap

    def _pop(self) -> Task | None:
        heap = self._heap()
        return heappop(heap)[1] if heap else None

    def _begin(self, task: Task) -> None:
        task.started = True
        task.place = None
        task.progress_at = time.monotonic()
        self._running[task] = None
        task.patient = task.can_wait
        self._patient += task.patient
        if len(self._running) == 1:
            self._watch.notify()  # the watchdog sleeps without a limit while nothing runs

    def _leave(self, task: Task) -> None:
        """Take a task, which no longer runs or no longer counts, out of its chain: the next of its key may run."""
        self._rest(task)
        chain = self._chains[task.key]
        chain.popleft()
        if chain:
            self._enqueue(task.key)
        else:
            del self._chains[task.key]

    def _rest(self, task: Task) -> None:
        self._running.pop(task)
        if task.patient:
            self._patient -= 1
            self._work_there.notify()  # a queued one may have waited for its turn

    def _step_back(self, task: Task) -> None:
        """Queue a task that has paused: it stays the first of its key, and waits while its gate is closed."""
        self._rest(task)
        task.started = task.paused = False
        self._enqueue(task.key)  # opened meanwhile, perhaps

    def _set_aside(self, task: Task) -> list[Task]:
        """Give a running task up; its thread counts as hung until the call returns. Return the tasks behind it, to refuse."""
        task.abandon()
        self.hung += 1
        self._rest(task)
        self._stuck.add(task.key)
        return list(self._chains.pop(task.key))[1:]

    def _empty_queues(self) -> list[Task]:
        refused = []
        for key, chain in list(self._chains.items()):
            refused += [task for task in chain if not task.started]
            running = [task for task in chain if task.started]
            if running:
                self._chains[key] = deque(running)
            else:
                del self._chains[key]
        self._queue.clear()
        self._patient_queue.clear()
        return refused

    # ----------------------------------------------------------------------------------------- the threads

    def _refuse(self, task: Task, why: str) -> None:
        task.started = True
        task.end(False)
        self._tell(task, MoveDone(task.move or 0, False, error=why, why="refused"), "refused")

    def _worker(self) -> None:
        while True:
            with self._lock:
                while (task := self._pop()) is None:
                    if self._closed:
                        self._alive -= 1
                        self._idle.notify_all()
                        return
                    self._work_there.wait()
                self._begin(task)
            if not self._run(task):
                return

    def _run(self, task: Task) -> bool:
        """Carry a task out; False when this thread has been replaced and should end."""
        start = time.perf_counter()
        error, kind = None, None
        try:
            task.bytes += task.work(task)
        except Exception as caught:
            error, kind = str(caught) or repr(caught), kind_of(caught)
            if not isinstance(caught, StoreError):
                log.exception("a move failed in a way that nobody foresaw")
        task.seconds += time.perf_counter() - start
        with self._lock:
            stays = True
            if task.paused and error is None and not task.abandoned:
                if not self._closed:
                    self._step_back(task)
                    return True
                error, kind = "the store is closed", "refused"
            if task.abandoned:
                self.hung -= 1
                self._stuck.discard(task.key)
                stays = self._alive - self.hung <= self._normal
                self._alive -= not stays
                done = MoveDone(task.move or 0, False, error="returned after its time-out", why="timeout")
                kind = None
            else:
                self._leave(task)
                done = MoveDone(task.move or 0, error is None, task.bytes, task.seconds, error, why=kind)
            self._reporting += 1
        task.end(done.ok)
        self._tell(task, done, kind)
        with self._lock:
            self._reporting -= 1
            self._idle.notify_all()
        return stays

    def _tell(self, task: Task, done: MoveDone, kind: str | None) -> None:
        if task.move is not None:
            self._report(task, done, kind)

    def _watchdog(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                now = time.monotonic()
                late = [task for task in self._running if now >= task.progress_at + self._timeout]
                if not late:
                    first = min((task.progress_at for task in self._running), default=None)
                    self._watch.wait(None if first is None else first + self._timeout - now)
                    continue
                refused = []
                for task in late:
                    refused += self._set_aside(task)
                    if self._alive < self._normal + MAX_REPLACEMENTS:
                        self._spawn()
                refused += self._empty_queues() if self._gone else []
                self._reporting += 1
            for task in late:
                log.warning("a move made no progress for %.1f s and was given up", self._timeout)
                task.end(False)
            for task in late:
                done = MoveDone(task.move or 0, False, error="time-out", slots_busy=True, why="timeout")
                self._tell(task, done, "timeout")
            for task in refused:
                self._refuse(task, "the disk does not answer")
            with self._lock:
                self._reporting -= 1
                self._idle.notify_all()
