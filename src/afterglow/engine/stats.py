"""Numbers about the engine, for metrics and benchmarks. Reading them never waits for the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from afterglow.plan.step import Step
from afterglow.request import CachedTokens


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Levels now, and totals since the start. Tokens are prompt tokens unless said otherwise."""

    running: int = 0
    waiting: int = 0
    device_used_bytes: int = 0
    device_capacity_bytes: int = 0
    host_used_bytes: int = 0
    host_capacity_bytes: int = 0
    disk_used_bytes: int = 0
    disk_capacity_bytes: int = 0
    extents: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens_device: int = 0
    cached_tokens_host: int = 0
    cached_tokens_disk: int = 0
    prefilled_tokens: int = 0
    requests_stop: int = 0
    requests_length: int = 0
    requests_cancelled: int = 0
    requests_error: int = 0
    steps: int = 0
    plan_seconds: float = 0.0
    forward_seconds: float = 0.0
    load_bytes: int = 0
    load_seconds: float = 0.0
    store_bytes: int = 0
    store_seconds: float = 0.0
    host_evictions: int = 0
    disk_evictions: int = 0
    device_evictions: int = 0
    damaged_extents: int = 0
    load_failures: int = 0
    store_failures: int = 0
    unsaved_rows: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class Totals:
    """What the engine itself counts; written by its thread alone."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefilled_tokens: int = 0
    cached: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "disk": 0})
    finishes: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    plan_seconds: float = 0.0
    forward_seconds: float = 0.0

    def admitted(self, prompt: int, cached: CachedTokens) -> None:
        self.prompt_tokens += prompt
        self.cached["device"] += cached.device
        self.cached["host"] += cached.host
        self.cached["disk"] += cached.disk

    def finished(self, reason: str) -> None:
        self.finishes[reason] = self.finishes.get(reason, 0) + 1

    def step(self, step: Step, plan_seconds: float, forward_seconds: float) -> None:
        self.steps += 1
        self.plan_seconds += plan_seconds
        self.forward_seconds += forward_seconds
        self.prefilled_tokens += sum(len(run.tokens) for run in step.runs if len(run.tokens) > 1)
