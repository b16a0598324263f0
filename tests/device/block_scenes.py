"""Models in blocks on a device, and on the CPU as what their blocks stand for: scenes for `play.py`."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.random_gguf import write_random

from afterglow.choices import QuantizationName
from afterglow.config import EngineConfig
from afterglow.kernels.device_products import RoundedMatrix, rounded_rows
from afterglow.kernels.packed import BLOCK_FORMATS
from afterglow.model.decoder import PlainAttend
from afterglow.model.loader import load_model
from afterglow.model.presets import save_hf
from afterglow.model.spec import ModelSpec, RopeSpec
from tests.device import pretend
from tests.device.scenes import ask, draw, load
from tests.model.test_float8 import CASES as FLOATS
from tests.model.test_quantized import CASES, SPEC, write

SMALL = ModelSpec(
    family="llama",
    layers=1,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ffn=256,
    vocab=300,
    max_positions=1024,
    rope=RopeSpec(dim=64, base=10000.0),
    bos_id=1,
    eos_ids=(2,),
)
FILES = [name for name in BLOCK_FORMATS if name not in ("A4", "A8")]


def logits(device: str, folder: Path) -> list[Any]:
    """Logits of a file in each format, and of checkpoints: of their last row, and how weights are kept."""
    how: QuantizationName = "auto" if device == "cuda" else "none"
    paths = []
    for number, block_format in enumerate(FILES):
        paths.append(folder / f"{block_format}.gguf")
        folder.mkdir(exist_ok=True)
        tied = number % 2 == 0  # the head of the others is in another format
        write_random(
            paths[-1], replace(SMALL, tied_embeddings=tied), block_format, head_format=None if tied else "Q6_K"
        )
    save_hf(SPEC, folder / "plain")
    for name in ("gptq 4 bits", "gptq 4 bits, activation order", "gptq 8 bits", "awq", "compressed 4 bits, asymmetric",
                 "compressed 8 bits, by output", "compressed int8, groups, asymmetric", *FLOATS):  # fmt: skip
        (folder / name).mkdir()
        paths.append(write(folder / "plain", folder / name, (CASES | FLOATS)[name])[0])
    found = []
    on = "cuda:0" if device == "cuda" else device
    with pretend.active() if device == "cuda" else contextlib.nullcontext():
        for path in paths:
            model = load_model(path, dtype="float32", device=on, quantization=how)
            ids, positions = (torch.arange(20).to(model.device) * by for by in (11, 1))
            rows = model.logits(model.forward(ids, positions, PlainAttend(model, positions, [20])))
            found.append([path.stem, model.quantization, rows[-1].cpu().tolist()])
    return found


def products(device: str, folder: Path) -> list[Any]:
    """Tokens by a file with numbers, scales and offsets; and how often Triton's kernel multiplied by it."""
    from tests.device.watching import watch

    folder.mkdir(exist_ok=True)
    path = folder / "blocks.gguf"
    write_random(path, SMALL, "Q4_K", head_format="Q6_K")
    cuda = device == "cuda"
    with pretend.active() if cuda else contextlib.nullcontext():
        model = load_model(
            path, dtype="float32", device="cuda:0" if cuda else device, quantization="auto" if cuda else "none"
        )
        ids, positions = (torch.arange(20).to(model.device) * by for by in (11, 1))
        rows = model.logits(model.forward(ids, positions, PlainAttend(model, positions, [20])))
        chosen = rows.argmax(dim=1).cpu().tolist()
    return [chosen, watch.counts["launches of _multiply"]]


def batches(device: str, folder: Path) -> list[int]:
    """Return how often Triton's kernel multiplies one row, those of the largest batch by default, and one more."""
    from tests.device.watching import watch

    found = []
    with pretend.active():
        parts = rounded_rows(torch.randn(8, 64), 8, False)
        matrix = RoundedMatrix(*(part.to("cuda:0") for part in parts), 64)
        matrix(torch.ones(1, 64).to("cuda:0"))  # tries the kernel
        most = EngineConfig().batch_on("cuda")
        for rows in (1, most, most + 1):
            before = watch.counts["launches of _multiply"]
            matrix(torch.ones(rows, 64).to("cuda:0"))
            found.append(watch.counts["launches of _multiply"] - before)
    return found


def reuse(device: str, folder: Path) -> list[Any]:
    """A conversation whose rows come from the device, host memory and disk, and beside it the same asked without a cache."""
    folder.mkdir(exist_ok=True)
    path = folder / "blocks.gguf"
    write_random(path, SMALL, "Q4_K", head_format="Q6_K")
    how: QuantizationName = "auto" if device == "cuda" else "none"
    engine = load(device, folder / "cache", path, quantization=how)
    prefix = draw(1, 150)
    found = ask(engine, [prefix])
    for tier in ("device", "host", "disk"):
        engine.settle()
        if tier != "device":
            engine.demote(tier)
        asked = [*prefix, *draw(len(found), 10)]
        found += ask(engine, [asked])
        found += ask(engine, [asked], reuse=False)
    engine.close()
    return found
