"""Record what happens inside a real engine, as events in their order. Any event can be held back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from afterglow.engine.engine import Engine
from afterglow.engine.grammars.masks import Constraint
from afterglow.engine.runner import TorchRunner
from afterglow.engine.token_outputs import RunOutput
from afterglow.model.decoder import Attend, Attention, Decoder, Hidden
from afterglow.plan.step import ExtentRecord, Step
from afterglow.request import CachedTokens, Output, Request, SamplingParams
from afterglow.store.extents.tier import ExtentRead, HostArena, Tier
from tests import doors
from tests.engine.conftest import VOCAB
from tests.waiting import wait_for

LAYERS = 3
SECONDS = 30.0  # after which a test gives up

Moment = tuple[Any, ...]


class Timeline:
    """Record events in order, and hold some back."""

    def __init__(self) -> None:
        self._happened: dict[Moment, int] = {}
        self._held: dict[Moment, bool] = {}  # has a thread come to it?
        self._changed = threading.Condition()

    def come(self, *moment: Any) -> None:
        """It happens now, or when it is no longer held back."""
        with self._changed:
            if moment in self._held:
                self._held[moment] = True
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: moment not in self._held, SECONDS), f"{moment} was never let go"
            assert moment not in self._happened, f"{moment} happened twice"
            self._happened[moment] = len(self._happened)
            self._changed.notify_all()

    def hold(self, *moments: Moment) -> None:
        with self._changed:
            self._held.update(dict.fromkeys(moments, False))

    def let_go(self, *moments: Moment) -> None:
        """These, or (none given) everything."""
        with self._changed:
            for moment in moments or list(self._held):
                self._held.pop(moment)
            self._changed.notify_all()

    def wait(self, *moment: Any) -> None:
        """Until it has happened."""
        with self._changed:
            assert self._changed.wait_for(lambda: moment in self._happened, SECONDS), f"{moment} did not happen: {self}"

    def wait_held(self, *moment: Any) -> None:
        """Wait until a thread has come to a held moment."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._held[moment], SECONDS), f"no thread came to {moment}: {self}"

    def __contains__(self, moment: Moment) -> bool:
        return moment in self._happened

    def ordered(self, *moments: Moment) -> bool:
        """Tell whether all these moments happened, in this order."""
        places = [self._happened[moment] for moment in moments]
        return places == sorted(places)

    def of(self, what: str) -> list[Moment]:
        """All moments of a kind so far, in order."""
        with self._changed:
            return [moment for moment in self._happened if moment[0] == what]

    def __str__(self) -> str:
        return "\n".join(map(str, self._happened))


class RecordingTier:
    """A Tier that tells: ("write", extent) before one is written, ("ask", extent, layer) when a layer is asked for, ("load",
    extent, layer) when it has been read and before the store knows. Extents are numbered as they are written first."""

    def __init__(self, real: Tier, timeline: Timeline) -> None:
        self.real = real
        self.timeline = timeline
        self.names: dict[str, int] = {}

    def write(self, record: ExtentRecord, arena: HostArena, slots: Sequence[int], progress: Callable[[], None]) -> int:
        name = self.names.setdefault(record.id, len(self.names))
        self.timeline.come("write", name)
        return self.real.write(record, arena, slots, progress)

    def read(self, read: ExtentRead, layer_done: Callable[[int], None], first: int = 0, stop: int | None = None) -> int:
        there = first
        for layer in range(LAYERS)[first:stop]:
            self.timeline.come("ask", self.names[read.extent], layer)

        def arrived(layers: int) -> None:
            nonlocal there
            for layer in range(there, layers):
                self.timeline.come("load", self.names[read.extent], layer)
                layer_done(layer + 1)
            there = max(there, layers)

        return self.real.read(read, arrived, first, stop)

    def delete(self, extent: str) -> None:
        self.real.delete(extent)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class RecordingRows:
    """The arena's rows as the saver writes them: ("save", layer, n) before a layer's n-th rows are copied and ("saved",
    layer, n) after; ("save block", n) and ("saved block", n) for decoded rows of all layers."""

    def __init__(self, arena: HostArena, timeline: Timeline) -> None:
        self.layout = arena.layout
        self.slot_rows = self
        self._real = arena.slot_rows
        self._timeline = timeline
        self._counts: dict[Any, int] = {}

    def __setitem__(self, where: tuple[Any, ...], rows: Any) -> None:
        layer, kv = where[:2]
        whole = layer == slice(None)
        key = None if whole else layer
        number = self._counts.get(key, 0)
        moment = ("block", number) if whole else ("", layer, number)
        if whole or kv == 0:
            self._timeline.come(f"save {moment[0]}".strip(), *moment[1:])
        self._real[where] = rows
        if whole or kv == 1:
            self._counts[key] = number + 1
            self._timeline.come(f"saved {moment[0]}".strip(), *moment[1:])


class RecordingDecoder:
    """A Decoder that tells ("reaches", who, pass, layer) before a layer's attention, and ("computed", who, pass, layer)
    after it."""

    def __init__(self, real: Decoder, timeline: Timeline) -> None:
        self.real = real
        self.timeline = timeline
        self.who = ""
        self.passes: dict[str, int] = {}

    def go_on(self, hidden: Hidden, attend: Attend, wanted: Tensor | None = None, stop: int | None = None) -> None:
        who = self.who
        number = self.passes.get(who, 0)
        self.passes[who] = number + 1

        def recorded(layer: int, attention: Attention, x: Tensor) -> Tensor:
            self.timeline.come("reaches", who, number, layer)
            out = attend(layer, attention, x)
            self.timeline.come("computed", who, number, layer)
            return out

        self.real.go_on(hidden, recorded, wanted, stop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class RecordingRunner:
    """Tells the decoder whose pass it is: one job's, because no more than one runs at a time here."""

    def __init__(self, real: TorchRunner, timeline: Timeline) -> None:
        self.real = real
        self.decoder = real.decoder = RecordingDecoder(real.decoder, timeline)  # type: ignore[assignment]
        self._names: dict[int, str] = {}

    def register(self, job: int, request: Request, constraint: Constraint | None = None) -> None:
        self._names[job] = request.id
        self.real.register(job, request, constraint)

    def run(self, step: Step) -> RunOutput:
        if step.runs:
            (run,) = step.runs
            self.decoder.who = self._names[run.job]
        return self.real.run(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class Scene:
    """An engine that tells what it does; requests by name."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.timeline = Timeline()
        self.outputs: dict[str, list[Output]] = {}
        store = engine.parts.store
        if doors.tier_of(store) is not None:
            doors.put_tier(store, RecordingTier(doors.tier_of(store), self.timeline))
        doors.wrap_arena(doors.saver_of(store), lambda arena: RecordingRows(arena, self.timeline))
        engine.parts.runner = RecordingRunner(engine.parts.runner, self.timeline)  # type: ignore[arg-type]
        engine.start()

    def submit(self, who: str, prompt: list[int], max_tokens: int = 1, reuse: bool = True) -> None:
        """Its last output is the moment ("ended", who)."""
        outputs = self.outputs[who] = []

        def take(output: Output) -> None:
            outputs.append(output)
            if output.finish_reason is not None:
                self.timeline.come("ended", who)

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=VOCAB, ignore_eos=True)
        self.engine.submit(Request(who, prompt, sampling, reuse=reuse), take)

    def run(self, who: str, prompt: list[int], max_tokens: int = 1, reuse: bool = True) -> list[int]:
        """The same, to its end: the tokens of the reply."""
        self.submit(who, prompt, max_tokens, reuse)
        self.timeline.wait("ended", who)
        return [token for output in self.outputs[who] for token in output.tokens]

    def cached(self, who: str) -> CachedTokens:
        return self.outputs[who][-1].cached

    def answers(self) -> bool:
        """The engine's thread is not inside a step."""
        return self.engine.sessions("") == []

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that is no moment."""
        wait_for(condition, SECONDS, self.timeline)

    def check(self, who: str, prompt: list[int]) -> None:
        """What `who` was told is what it is told without any cache."""
        told = [dict(p.top) for output in self.outputs[who] for p in output.logprobs]
        self.run(f"{who} again", prompt, len(told), reuse=False)
        again = [dict(p.top) for output in self.outputs[f"{who} again"] for p in output.logprobs]
        assert len(told) == len(again) > 0
        for a, b in zip(told, again, strict=True):
            assert a.keys() == b.keys()
            assert max(abs(a[token] - b[token]) for token in a) < 1e-4
