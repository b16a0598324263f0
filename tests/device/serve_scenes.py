"""What a server loads on a device: a scene for `play.py`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from afterglow.cli.serve import FoundModel, LoadedParts, loaded
from afterglow.config import CacheConfig, EngineConfig
from afterglow.request import Output, Request, SamplingParams
from afterglow.server.server_config import EngineProcessMode, ServerConfig
from tests.device import pretend
from tests.memo.tiny import tiny_encoder
from tests.structured_model import random_model

MiB = 2**20


def placed(device: str, folder: Path) -> list[Any]:
    """Of a model that generates, by each mode, and of an encoder: whether it is in a process of its own, and what it answers."""
    folder.mkdir()
    if device == "cuda":  # the other process sees the device too
        (folder / "sitecustomize.py").write_text("from tests.device import pretend\npretend.install()\n")
        sys.path.insert(0, str(folder))
    cache = CacheConfig(device_cache=8 * MiB, host_cache=8 * MiB, disk_cache=0, warm_start=False)
    config = EngineConfig(device=device, dtype="float32", cache=cache)
    decoder, encoder = random_model(folder / "decoder"), tiny_encoder(folder / "encoder")
    modes: list[tuple[Path, EngineProcessMode]] = [(decoder, "auto"), (decoder, "off"), (encoder, "auto")]
    found = []
    for model, mode in modes:
        server = ServerConfig(engine_process=mode, served_model_name=(model.name,))
        with (
            pretend.active() if device == "cuda" else contextlib.nullcontext(),
            loaded(FoundModel(model, model.name, server, config)) as parts,
        ):
            found.append([parts.kill is not None, _tokens(parts) if model is decoder else _vector(parts)])
    return found


def _tokens(parts: LoadedParts) -> list[int]:
    """Ask the engine for a reply."""
    outputs: SimpleQueue[Output] = SimpleQueue()
    sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    parts.engine.submit(Request("r", list(range(20, 40)), sampling), outputs.put)
    tokens: list[int] = []
    while True:
        output = outputs.get(timeout=60)
        tokens += output.tokens
        if output.finish_reason is not None:
            return tokens


def _vector(parts: LoadedParts) -> list[float]:
    """Have the encoder embed a text."""
    (embedder,) = parts.embedders
    vectors: list[list[float]] = embedder.embed(["the cat sat on the mat"]).vectors.tolist()
    return vectors[0]
