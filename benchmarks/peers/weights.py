"""One set of random weights in every format that an engine here reads."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from afterglow.errors import ConfigError
from afterglow.model.presets import PRESETS, save_hf
from benchmarks.common.paths import ROOT
from benchmarks.peers.environments import ENVIRONMENTS
from benchmarks.peers.processes import PeerError


def word(token: int) -> str:
    """The text of a token: each is a word of its own, so that ids can be read off an answer."""
    return f"t{token}"


def tokens_in(text: str) -> list[int]:
    """Ids of the tokens that were decoded to this text. Raises: ValueError on any other text."""
    return [int(part.removeprefix("t")) for part in text.split()]


class Weights:
    """The weights of a preset in `folder`; each format is written when it is first asked for."""

    def __init__(self, model: str, seed: int, folder: Path, environments: Path) -> None:
        if model not in PRESETS:
            raise ConfigError(f"{model!r} is not a preset; presets: {', '.join(sorted(PRESETS))}")
        self.model, self.seed = model, seed
        self.spec = PRESETS[model]
        self._folder = folder / model
        self._environments = environments

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in float32."""
        return 2 * self.spec.layers * self.spec.kv_heads * self.spec.head_dim * 4

    @property
    def hf(self) -> Path:
        """A Hugging Face directory: float32 safetensors, and a tokenizer of words."""
        folder = self._folder / "hf"
        if not (folder / "tokenizer_config.json").exists():
            save_hf(self.model, folder, seed=self.seed)
            vocab = {word(token): token for token in range(self.spec.vocab)}
            tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=word(0)))
            tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            tokenizer.save(str(folder / "tokenizer.json"))
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": self.spec.max_positions}
            (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        return folder

    @property
    def gguf(self) -> Path:
        """llama.cpp's file, all float32."""
        path = self._folder / "model.gguf"
        if not path.exists():
            self._made("llama", path, ["-m", "benchmarks.peers.workers.to_gguf", str(self.hf), "OUT"])
        return path

    @property
    def onnx(self) -> Path:
        """The folder that onnxruntime-genai's own model builder writes, in float32 for the CPU."""
        path = self._folder / "onnx"
        if not path.exists():
            builder = [
                "-m",
                "onnxruntime_genai.models.builder",
                "-m",
                str(self.hf),
                "-o",
                "OUT",
                "-p",
                "fp32",
                "-e",
                "cpu",
            ]
            self._made("ort", path, [*builder, "-c", str(self._folder / "builder")])
        return path

    def _made(self, environment: str, path: Path, arguments: list[str]) -> None:
        """Run a converter of this environment; what it writes gets its name when it is complete."""
        python = ENVIRONMENTS[environment].python(self._environments)
        part = path.with_name(f"part-{path.name}")
        shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)
        command = [str(python), *(str(part) if a == "OUT" else a for a in arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode or not part.exists():
            raise PeerError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
        part.rename(path)
