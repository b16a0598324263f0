"""What relay attention makes of a whole server: continuous batching over requests that share a system prompt.

The server is the one that RelayAttention measured (vLLM 0.2.6): whole prompts are prefilled while decoding waits, up to 256
requests decode together as long as their keys and values fit, the youngest gives way and starts over where they do not.
Between two events every decoding step differs from the one before by its longer contexts alone, so the steps between are
one sum. Times in seconds, lengths in tokens, sizes in bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from random import Random
from typing import NamedTuple

from afterglow.errors import ConfigError
from afterglow.sim.machine.catalogue import Hardware, kv_room
from afterglow.sim.machine.shape import ModelShape
from afterglow.sim.operators.relay import Heads, Mode, Roof, attention_seconds

# Fitted to Figure 6 (LLaMA-2-7B on A40 and A100-80G, three lengths, three servers), then left alone for every other device,
# model and workload.
PREFILL_EFFICIENCY = 0.6  # of the matrix units' peak
WEIGHT_EFFICIENCY = 0.9  # of the memory bandwidth, reading weights
HOST_STEP_S = 0.008  # a step's scheduling and launches
HOST_REQUEST_S = 0.0001  # and, for each request in it, tables, sampling, detokenising in Python
EXCHANGE_S = 130e-6  # several devices: adding up their parts, twice per layer; fitted to Table 4's 30B at 512 tokens
BLOCK = 16  # tokens; a request that decodes may need another block
WATERMARK = 0.01  # of the room stays free when requests are admitted, lest the youngest come and go


class ServingRequest(NamedTuple):
    prompt: int  # tokens of its own, the system prompt aside
    reply: int
    arrival: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ServingModel:
    """A model on devices, and how it attends to the system prompt of `system` tokens. `plain` also keeps and prefills it
    once per request, `shared` and `relay` once altogether."""

    model: ModelShape
    hardware: Hardware
    mode: Mode
    system: int
    devices: int = 1
    max_batch: int = 256
    max_prefill: int = 4096  # tokens of one pass
    host_step: float = HOST_STEP_S
    host_request: float = HOST_REQUEST_S
    prefill_efficiency: float = PREFILL_EFFICIENCY
    room: int = field(init=False)  # tokens whose keys and values fit
    _roof: Roof = field(init=False)

    def __post_init__(self) -> None:
        if self.system < 0:
            raise ConfigError(f"the system prompt must have 0 or more tokens, got {self.system}")
        room = kv_room(self.model, self.hardware, self.devices) // self.model.kv_bytes_per_token()
        if self.mode != "plain":
            room -= self.system
        object.__setattr__(self, "room", room)
        object.__setattr__(self, "_roof", Roof.of(self.hardware, self.devices, "matrix", 0.0))  # graphs: no launches

    def kept(self, own: int) -> int:
        """Tokens that a request with `own` of its own takes room for."""
        return own + (self.system if self.mode == "plain" else 0)

    def step_seconds(self, batch: int, own: float) -> float:
        """One decoding step of `batch` requests that have `own` tokens altogether, the system prompt's aside."""
        attention = attention_seconds(self.mode, Heads.of(self.model), self._roof, batch, own / batch, self.system)
        return self._linear(batch, batch) + self.model.layers * attention + self.host_step + self.host_request * batch

    def prefill_seconds(self, prompts: Sequence[int]) -> float:
        """A pass over whole prompts."""
        history = 0 if self.mode == "plain" else self.system
        attending = sum(self.model.attention_flops(self.kept(tokens), history) for tokens in prompts)
        flops = self.devices * self.hardware.flops * self.prefill_efficiency
        rows = sum(self.kept(tokens) for tokens in prompts)
        host = self.host_step + self.host_request * len(prompts)
        return self._linear(rows, len(prompts)) + attending / flops + host

    def _linear(self, rows: int, jobs: int) -> float:
        """Compute the seconds of all matrices for so many rows; `jobs` rows need logits."""
        work = rows * self.model.linear_flops_per_token + jobs * self.model.head_flops
        reading = self.model.weight_bytes() / (self.devices * self.hardware.memory_bandwidth * WEIGHT_EFFICIENCY)
        exchange = 2 * self.model.layers * EXCHANGE_S if self.devices > 1 else 0.0
        return exchange + max(reading, work / (self.devices * self.hardware.flops * self.prefill_efficiency))


@dataclass(frozen=True, slots=True)
class Served:
    """What came of a run. `normalised`: the mean over requests of seconds from arrival to the last token, per token."""

    requests: int
    tokens: int
    seconds: float
    normalised: float
    mean_batch: float
    preempted: int

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds


class _Running(NamedTuple):
    ends: int  # number of the decoding step after which it has all its tokens
    order: int
    request: ServingRequest
    begun: int  # number of the step before its first
    prompt: int  # tokens that it was prefilled with


def serve(server: ServingModel, requests: Sequence[ServingRequest]) -> Served:
    """Serve requests in order of arrival. Raises: ConfigError, if a request does not fit on its own."""
    return _ServingRun(server, requests).result()


class _ServingRun:
    def __init__(self, server: ServingModel, requests: Sequence[ServingRequest]) -> None:
        self.server = server
        self.waiting: deque[tuple[ServingRequest, int]] = deque()  # with the tokens to prefill
        self.coming = deque(sorted(requests, key=lambda r: r.arrival))
        self.running: list[_Running] = []  # a heap: the first to end in front
        self.now, self.step, self.own, self.held, self.order = 0.0, 0, 0, 0, 0
        self.batches, self.delays, self.preempted = 0.0, 0.0, 0
        for request in requests:
            if server.kept(request.prompt + request.reply) > server.room or request.reply < 1 or request.prompt < 1:
                raise ConfigError(
                    f"a request of {request.prompt} and {request.reply} tokens after {server.system} cannot be served: "
                    f"there is room for {server.room}"
                )
        self.count, self.tokens = len(requests), sum(request.reply for request in requests)

    def result(self) -> Served:
        while self.coming or self.waiting or self.running:
            self._arrive()
            if not self._prefill():
                if self.running:
                    self._decode()
                else:
                    self.now = max(self.now, self.coming[0].arrival)
        count, steps = self.count, max(self.step, 1)
        return Served(count, self.tokens, self.now, self.delays / count, self.batches / steps, self.preempted)

    def _arrive(self) -> None:
        while self.coming and self.coming[0].arrival <= self.now:
            request = self.coming.popleft()
            self.waiting.append((request, request.prompt))

    def _prefill(self) -> bool:
        """One pass over those that wait, as many as the pass and the room take."""
        server, rows = self.server, 0
        taken: list[tuple[ServingRequest, int]] = []
        while self.waiting and len(self.running) + len(taken) < server.max_batch:
            request, prompt = self.waiting[0]
            size = server.kept(prompt)
            spare = BLOCK * (len(self.running) + len(taken) + 1) + WATERMARK * server.room
            if (taken and rows + size > server.max_prefill) or (
                self._busy(taken) and self.held + size + spare > server.room
            ):
                break
            taken.append(self.waiting.popleft())
            rows += size
            self.held += size + 1
            self.own += prompt + 1
        if not taken:
            return False
        self.now += server.prefill_seconds([prompt for _, prompt in taken])
        for request, prompt in taken:  # the pass gives the first token
            left = request.reply - (prompt - request.prompt) - 1
            self.order += 1
            run = _Running(self.step + left, self.order, request, self.step, prompt)
            if left:
                heappush(self.running, run)
            else:
                self._finish(run)
        return True

    def _busy(self, taken: Sequence[object]) -> bool:
        return bool(self.running or taken)

    def _decode(self) -> None:
        """All steps until one ends, room is short, or a request arrives."""
        batch = len(self.running)
        steps = self.running[0].ends - self.step
        steps = min(steps, (self.server.room - self.held) // batch)
        if steps < 1:
            self._preempt()
            return
        if self.coming and batch < self.server.max_batch:
            gap = self.coming[0].arrival - self.now
            steps = min(steps, max(1, int(gap / self.server.step_seconds(batch, self.own)) + 1))
        middle = self.own + batch * (steps - 1) / 2  # times grow with contexts evenly
        self.now += steps * self.server.step_seconds(batch, middle)
        self.step += steps
        self.batches += steps * batch
        self.own += steps * batch
        self.held += steps * batch
        while self.running and self.running[0].ends == self.step:
            self._finish(heappop(self.running))

    def _finish(self, run: _Running) -> None:
        self._leave(run)
        self.delays += (self.now - run.request.arrival) / run.request.reply

    def _leave(self, run: _Running) -> None:
        own = run.prompt + 1 + self.step - run.begun
        self.own -= own
        self.held -= self.server.kept(own)

    def _preempt(self) -> None:
        """The youngest gives way: what it has said will be prefilled with its prompt."""
        youngest = max(self.running, key=lambda run: run.order)
        self.running.remove(youngest)
        heapify(self.running)
        self._leave(youngest)
        self.preempted += 1
        self.waiting.appendleft((youngest.request, youngest.prompt + 1 + self.step - youngest.begun))


# ----------------------------------------------------------------------------------------------- workloads


@dataclass(frozen=True, slots=True)
class Lengths:
    """A Weibull law of lengths from `least` on, drawn anew where they are more than `most`. Shape 1: exponential."""

    least: int
    most: int
    scale: float = 1.0
    shape: float = 1.0

    def draw(self, rng: Random) -> int:
        if self.least == self.most:
            return self.least
        while (drawn := self.least + int(rng.weibullvariate(self.scale, self.shape))) > self.most:
            pass
        return drawn


# Bounds as in Table 1, at most 2,048 tokens together as in vLLM's benchmark. Scales and shapes are chosen so that means are
# near those of published ShareGPT lengths (250 and 230 tokens, the shortest tenth up to a dozen).
SHAREGPT = (Lengths(4, 1024, 240, 0.7), Lengths(4, 2013, 215, 0.82))
SHAREGPT_WINDOW = 2048


def requests(
    count: int, prompt: Lengths, reply: Lengths, seed: int = 0, rate: float = inf, most: int = SHAREGPT_WINDOW
) -> list[ServingRequest]:
    """`count` requests that arrive as a Poisson process of `rate` per second (inf: all at once)."""
    rng = Random(seed)
    found: list[ServingRequest] = []
    now = 0.0
    while len(found) < count:
        drawn = ServingRequest(prompt.draw(rng), reply.draw(rng), now)
        if drawn.prompt + drawn.reply <= most:
            found.append(drawn)
            now += rng.expovariate(rate) if rate < inf else 0.0
    return found


def sustained(
    server: ServingModel, lengths: tuple[Lengths, Lengths], target: float = 0.5, count: int = 1000, seed: int = 0
) -> float:
    """Requests per second at which the normalised latency reaches `target` seconds per token (7 halvings of an interval
    that holds it)."""

    def late(rate: float) -> bool:
        return serve(server, requests(count, *lengths, seed=seed, rate=rate)).normalised > target

    low, high = 0.0, 1.0
    while not late(high):
        low, high = high, 2 * high
        if high > 1e4:
            return inf
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (low, middle) if late(middle) else (middle, high)
    return (low + high) / 2
