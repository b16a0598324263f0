"""The doors through which tests reach private members: each names what it opens. No other file of tests does so.

A member that moves or is renamed is mended here, in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

from afterglow.kernels import attention, gate
from afterglow.model import keeping

# ---- model and kernels


def forget_trials_of_matrices() -> None:
    """Forget which way to keep a matrix was found fastest."""
    keeping._fastest.cache_clear()


def fused_merge() -> Any:
    """Return the cached function that returns the merge as one kernel."""
    return attention._fused


def kernel_modules() -> Any:
    """Return the cached function that imports a kernel of Triton's."""
    return gate._module


def attention_by_formula() -> Callable[..., Any]:
    """Return attention for devices without a fused operator."""
    return attention._explicit


def compiled_reads(reads: Any) -> Any:
    """Return the part of `Reads` that the compiled kernel does, or None."""
    return reads._native


def fused_projection(layer: Any) -> Any:
    """Return the matrix of queries, keys and values of a model's layer."""
    return layer._qkv


def value_projection(layer: Any) -> Any:
    """Return the matrix of values alone, or None if it was never asked for."""
    return layer._values


def leave_out_last_norm(decoder: Any) -> None:
    """Let a decoder return rows before its final norm."""
    decoder._norms = (*decoder._norms[:-1], lambda x: x)
    decoder._blocks = [None] * len(decoder.layers)


# ---- engine


def set_relay_costs(runner: Any, costs: Any) -> None:
    runner._costs = costs


def fill_new_contexts(monkeypatch: Any, number: float) -> None:
    """Let each page that a context gets be full of a number."""
    from afterglow.engine.page_pool import PagePool

    taken = PagePool.take

    def take(self: Any, *how: Any) -> Any:
        for page in taken(self, *how):
            page.data.fill_(number)
            yield page

    monkeypatch.setattr(PagePool, "take", take)


def contexts_of(runner: Any) -> list[Any]:
    """Return all contexts on the device, of running jobs and of finished ones."""
    return [*runner.contexts.running.values(), *runner.contexts.retained.values()]


def free_bytes_of(pool: Any) -> int:
    """Return the bytes of pages that no context holds."""
    slabs = [slab for kind in pool._slabs.values() for slab in kind]
    return sum(slab.free * slab.data.nbytes // (slab.free + slab.used) for slab in slabs)


def held_bytes(runner: Any) -> int:
    """Return the bytes of pages on the device that contexts hold."""
    return int(runner._pool.num_bytes) - free_bytes_of(runner._pool)


def around_each_step(carried_out: Callable[[Any, Callable[[], None]], None]) -> None:
    """Have engines carry out each step by `carried_out`, which is given the step and what carries it out: releases and runs."""
    from afterglow.engine.loop import EngineLoop

    execute = EngineLoop._execute

    def executed(self: EngineLoop, step: Any, began: float) -> None:
        carried_out(step, lambda: execute(self, step, began))

    EngineLoop._execute = executed  # type: ignore[method-assign]


def check_each_budget(patch: Any) -> list[tuple[int, int]]:
    """Have engines check in each step, once it has run: contexts hold no more than the plan counts, and the pool no more than its limit
    and what its slabs are rounded up to. Returns of each step the bytes that are held, and those that the plan counts."""
    from afterglow.engine.loop import EngineLoop
    from afterglow.engine.runner import TorchRunner

    execute, run, checked, plans = EngineLoop._execute, TorchRunner.run, list[tuple[int, int]](), dict[Any, Any]()

    def executed(self: EngineLoop, step: Any, began: float) -> None:
        plans[self.parts.runner] = self.parts.scheduler
        execute(self, step, began)

    def ran(self: TorchRunner, step: Any) -> Any:
        out = run(self, step)
        held, counted = held_bytes(self), plans[self].cache.device.used * self.shape.row_bytes
        checked.append((held, counted))
        assert held <= counted, f"{held} bytes are held, {counted} counted"
        slabs = [slab for kind in self._pool._slabs.values() for slab in kind[:1]]
        assert self._pool.num_bytes <= self._pool._limit + sum(slab.data.nbytes for slab in slabs)
        return out

    patch.setattr(EngineLoop, "_execute", executed)
    patch.setattr(TorchRunner, "run", ran)
    return checked


def lanes_copied_by(copied: Any) -> Any:
    """Have `copied` copy the rows of a lane of the tail buffer before they leave."""
    from afterglow.engine import tee

    return mock.patch.object(tee, "_copied", copied)


def gathered_by_torch() -> Any:
    """Have torch bring rows to a device: Triton's interpreter takes seconds for a launch."""
    from afterglow.kernels.slot_gather import SlotGather

    return mock.patch.object(SlotGather, "_put_on_device", return_value=False)


def relay_attention(relay: Any, layer: Any, q: Any) -> Any:
    """Return attention over shared segments alone, of layer 0."""
    return relay._attention(0, layer, q)


# ---- plan


def sessions_of(scheduler: Any) -> Any:
    """Return the sessions by key."""
    return scheduler.cache.sessions._sessions


def epochs_of(scheduler: Any) -> Any:
    """Return the epochs of contexts by request."""
    return scheduler.cache._epochs._epochs


def jobs_of(scheduler: Any) -> Any:
    """Return the plan's requests by number."""
    return scheduler._queue.jobs


def running_of(scheduler: Any) -> Any:
    """Return the requests of the batch."""
    return scheduler._batch.running


def admission_of(scheduler: Any) -> Any:
    return scheduler._admission


def merging_of(scheduler: Any) -> Any:
    return scheduler._merging


def end_flush(scheduler: Any) -> None:
    """Let the plan go on after a flush, as a restart would."""
    scheduler._flushing = False


def heap_of(ranking: Any) -> Any:
    """Return the heap of eviction candidates."""
    return ranking._heap


def line_of(ranking: Any) -> Any:
    """Return the candidates in order of arrival."""
    return ranking._line


def pins_held(pins: Any) -> Any:
    """Return the rows of each pin that is held."""
    return pins._kept


# ---- store


def tier_of(store: Any) -> Any:
    """Return the disk tier."""
    return store.on_disk.tier


def put_tier(store: Any, tier: Any) -> None:
    store.on_disk.tier = tier


def mover_of(store: Any) -> Any:
    return store._mover


def saver_of(store: Any) -> Any:
    return store._saver


def catalog_database(store: Any) -> Any:
    """Return the catalog's connection to SQLite."""
    return store.on_disk.catalog._db


def is_closed(part: Any) -> bool:
    """Return whether a mover or a saver has been told to close."""
    return bool(part._closed)


def running_moves(mover: Any) -> Any:
    return mover._running


def give_up_what_runs(mover: Any) -> None:
    """Let all moves that run now, and no later one, count as having made no progress for too long."""
    with mover._lock:
        for task in mover._running:
            task.progress_at = -math.inf
        mover._watch.notify_all()


def waiting_changes(objects: Any) -> Any:
    """Return the changes that a directory has not made yet."""
    return objects._changes._waiting


def end_rest(shared: Any) -> None:
    """Let a shared store that is left alone be asked again."""
    shared._remote._rests_until = 0.0


def room_of(saver: Any) -> Any:
    """Return the condition on which saves wait for room."""
    return saver._room


def waiting_saves(saver: Any) -> Any:
    """Return the line of saves that wait for room."""
    return saver._line


def limit_saves(saver: Any, bytes: int) -> None:
    saver.limit = bytes


def copied(saver: Any, size: int, seconds: float) -> None:
    """Let a saver know that copying `size` bytes has taken so long."""
    saver._copied = (float(size), seconds)


def wrap_arena(saver: Any, wrap: Callable[[Any], Any]) -> None:
    """Put something between the saver and the arena."""
    saver._arena = wrap(saver._arena)


def pending_notes(catalog: Any) -> Any:
    """Return the notes that are not yet written, by kind."""
    return catalog._noted


def remove_extent(store: Any, name: Any) -> None:
    store.on_disk.remove(name)


# ---- importance


def known_chunks(cache: Any) -> Any:
    return cache._chunks


def cached_rows(cache: Any) -> Any:
    return cache._rows


def layouts_of(loader: Any) -> Any:
    """Return the row layouts that are kept in memory."""
    return loader._layouts


def layout_rows_of(loader: Any) -> int:
    """Return the number of rows that kept layouts count."""
    return int(loader._layout_rows)


def changed_layouts(loader: Any) -> Any:
    return loader._changed


def layout_orders(loader: Any) -> Any:
    return loader._orders


def editions_of(prefix: Any) -> Any:
    return prefix._editions


def score_places(scores: Any) -> Any:
    return scores._places


def kept_scores(scores: Any) -> Any:
    return scores._kept


def waiting_work(idle: Any) -> Any:
    """Return the idle work that waits."""
    return idle._waiting


def work_under_way(idle: Any) -> Any:
    return idle._under_way


# ---- memo


def memo_identity(builder: Any) -> Any:
    return builder._identity


def collect_maps(builder: Any, store: Any, texts: Any) -> None:
    builder._collect(store, texts)


def watch_records(builder: Any, seen: Callable[[Any], None]) -> None:
    """Call `seen` with the missing texts before each pass that records maps."""
    record = builder._record

    def watched(store: Any, missing: Any, keep: Any, **more: Any) -> Any:
        seen(missing)
        return record(store, missing, keep, **more)

    builder._record = watched


def map_entries(store: Any) -> Any:
    return store._entries


# ---- server


def thread_of(worker: Any) -> Any:
    return worker._thread


def connections_of(service: Any) -> Any:
    """Return uvicorn's open connections."""
    return service._server.server_state.connections


def loop_of(service: Any) -> Any:
    return service._loop


def send_signal(service: Any) -> None:
    """Do what a signal to the process does."""
    service._on_signal()


def stopped_at(service: Any) -> float | None:
    """Return when the service was told to stop, or None."""
    return service._stopping  # type: ignore[no-any-return]


def stop_earlier(service: Any, seconds: float) -> None:
    """Move the moment of the first signal into the past."""
    service._stopping -= seconds


def recorder_file(recorder: Any) -> Any:
    return recorder._file


def is_ending(process: Any) -> bool:
    """Whether an engine's process has been told to end."""
    return bool(process._closing)


def kill_engines_that_end(monkeypatch: Any) -> None:
    """Kill each engine's process when it is told to end."""
    from afterglow.server.engine_process.client import EngineProcess

    end = EngineProcess._end

    def killed(process: Any, seconds: float) -> int:
        process._process.kill()
        return end(process, seconds)

    monkeypatch.setattr(EngineProcess, "_end", killed)


def registrar_of(engine: Any) -> Any:
    """Return the registrar of shared prefixes."""
    return engine._registrar


# ---- simulator


def unread_extents(executor: Any) -> list[Any]:
    """Return the extents that a simulated server still reads from far away."""
    return [*executor._far, *executor._fetching.values()]


def promised_reads(shared: Any) -> Any:
    return shared._promised


def due_turns(workload: Any) -> Any:
    return workload._due


def open_sessions(workload: Any) -> Any:
    return workload._live


def ends_of_sessions(workload: Any) -> Any:
    return workload._ends


# ---- text


def fresh_markers(tokenizer: Any) -> Any:
    """Return markers of a tokenizer that have rendered nothing."""
    return tokenizer.markers.__class__(tokenizer._fast, tokenizer.markers._ids)


def twin_of(markers: Any) -> Any:
    """Return the tokenizer without special tokens, or None if it was never needed."""
    return markers._twin


def find_twin(markers: Any) -> Any:
    return markers._find_twin()


def library_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer of the `tokenizers` library."""
    return tokenizer._fast


def special_tokens(tokenizer: Any) -> Any:
    """Return the ids of special tokens by name."""
    return tokenizer._special


def added_tokens(tokenizer: Any) -> Any:
    """Return the names of added tokens by id."""
    return tokenizer._added


def window_of(detokenizer: Any) -> Any:
    """Return the tokens that a detokenizer keeps."""
    return detokenizer._window


def shorten_queue(engine: Any, most: int) -> None:
    """Let an engine accept `most` waiting requests."""
    engine.loop.requests._max_queue = most
