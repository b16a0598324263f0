"""One life of an engine: opened, asked, closed. Lives of all arms take turns, and nothing else runs beside one.

The next life of an arm goes on with the conversation of the life before: from Afterglow's cache, or from llama.cpp's state file.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import agree
from benchmarks.peers.environments import own_python
from benchmarks.peers.plan import Plan, python_of
from benchmarks.peers.worker import Worker, worker

PREFILL, NEW, TURN, REPLY = 512, 32, 32, 4
EIGHT, EIGHT_PROMPT, EIGHT_NEW = 8, 32, 16
CONTEXT = 4096
BUDGETS = {"device_cache": 256 * 2**20, "host_cache": 64 * 2**20, "disk_cache": 4 * 2**30, "warm_start": True}
FIRST_TOKENS = 3  # prompts whose first token is compared with the other engine's


@dataclass(frozen=True)
class Arm:
    """An engine and what it opens: a GGUF file as it is, or (`rounding`) a checkpoint that Afterglow rounds itself."""

    engine: str  # "afterglow" or "llama-cpp"
    kind: str  # "Q4_0", ..., or "int8", "int4"
    path: Path
    vocab: int
    rounding: bool = False
    flags: tuple[tuple[str, Any], ...] = ()  # of llama.cpp

    @property
    def name(self) -> str:
        return f"{self.engine} {self.kind}"


@dataclass
class Lived:
    """What an arm's lives have shown so far, and the conversation that the next one goes on with."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    talk: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def add(self, measure: str, value: float) -> None:
        self.samples.setdefault(measure, []).append(value)


@contextmanager
def running(plan: Plan, arm: Arm) -> Iterator[Worker]:
    """The arm's engine, in a process of its own with its own library's waiting policy."""
    options: dict[str, Any] = {"model": str(arm.path)}
    if arm.engine == "llama-cpp":
        flags = dict(arm.flags)
        more = {"OMP_WAIT_POLICY": flags.pop("wait")} if "wait" in flags else {}
        options |= {"context": CONTEXT, "sequences": EIGHT, "kv": "default", **flags}
        with worker(plan, arm.name, python_of(arm.engine, plan.environments), "run_llama", options, **more) as started:
            yield started
        return
    options |= {"cache": str(_folder(plan, arm)), "budgets": BUDGETS}
    if arm.rounding:
        options["quantization"] = arm.kind
    with worker(plan, arm.name, own_python(), "run_afterglow", options, OMP_WAIT_POLICY="passive") as started:
        yield started


def live(plan: Plan, arm: Arm, number: int, lived: Lived, repeats: int = 1) -> None:
    """Life `number` (from 0): the samples go into `lived`. The first one finds neither the file nor a cache in memory."""
    rng = random.Random(f"{plan.seed} {arm.path.name} {number}")  # the same for both engines
    state = f"{_folder(plan, arm)}.state"
    if number == 0:
        forget(arm.path)
    with running(plan, arm) as engine:
        lived.settings = engine.settings
        lived.add("load" if number else "load, first", engine.settings["load_s"])
        lived.add("resident", memory(engine.child.process.pid)["VmRSS"])
        if lived.talk:
            lived.talk += agree.fresh(rng, arm.vocab, TURN)
            answer = engine.ask([lived.talk], REPLY, f"restore {state}")
            lived.add("ttft after a restart", answer.first)
        _asked(engine, arm, rng, lived, repeats)
        lived.add("peak", memory(engine.child.process.pid)["VmHWM"])
        engine.ask([], 0, f"save {state}")


def _asked(engine: Worker, arm: Arm, rng: random.Random, lived: Lived, repeats: int) -> None:
    """All that an engine is asked while it runs. No prompt comes twice but that of the conversation."""
    for _ in range(FIRST_TOKENS):  # they warm up, too
        lived.firsts += engine.ask([agree.fresh(rng, arm.vocab, EIGHT_PROMPT)], REPLY).tokens[0][:1]
    for _ in range(repeats):
        many = [agree.fresh(rng, arm.vocab, EIGHT_PROMPT) for _ in range(EIGHT)]
        lived.add("decode 8", engine.ask(many, EIGHT_NEW + 1).decode_rate())
        prompt = agree.fresh(rng, arm.vocab, PREFILL)
        answer = engine.ask([prompt], NEW + 1)
        lived.add("prefill", answer.prefill_rate(PREFILL))
        lived.add("decode 1", answer.decode_rate())
        lived.talk = [*prompt, *answer.tokens[0], *agree.fresh(rng, arm.vocab, TURN)]
        answer = engine.ask([lived.talk], REPLY, "continue")
        lived.add("ttft of a second turn", answer.first)
        lived.talk += answer.tokens[0]


def memory(pid: int) -> dict[str, int]:
    """Bytes of a process: VmRSS, now, and VmHWM, the most so far (proc(5))."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: 1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM")}


def forget(path: Path) -> None:
    """Take a model's files out of the page cache, so that they are read from the disk."""
    for file in path.iterdir() if path.is_dir() else (path,):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _folder(plan: Plan, arm: Arm) -> Path:
    folder = plan.folder / "cache" / arm.name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / arm.path.stem
