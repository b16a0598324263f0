"""`python -m tests.device.counts`: what a step asks of a CUDA device, by the number of requests in it, as a table.

Counted on the pretend device, with a model of two layers, so no figure depends on the machine. With TRITON_INTERPRET=1 Triton's kernels run,
in its interpreter, for `TRITON_BATCHES`, with shorter prompts: others take it long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

BATCHES = (1, 2, 8, 24)
TRITON_BATCHES = (2, 4, 8)
COLUMNS = ("launches", "copies to device", "copies to host", "synchronisations", "pinned allocations")
KINDS = {
    "decode": "decode",
    "decode, blocks leave": "decode, every 16th: rows leave for host memory",
    "prefill": "prefill of {new} tokens each",
    "reuse": "the same, behind 64 reused tokens each",
}


def measure(device: str, folder: Path, batches: Sequence[int] = BATCHES, new: int = 40) -> dict[str, Any]:
    """Count the steps of batches whose prompts have `new` tokens that are not reused, after the same that warm up. To be called where the
    pretend device is installed."""
    from tests.device import scenes
    from tests.device.watching import watch

    engine = scenes.load(device, folder, relay="off", max_batch=24, prefill_chunk=4096, speculate="off")
    found: dict[str, dict[str, int]] = {}
    waits, most = set[str](), 0
    first = count(3)  # no prompt begins as another one, so that none reuses what was not meant
    for number, batch in enumerate((*batches, *batches)):
        for kind in ("prefill", "reuse"):
            rows = new + 64 * (kind == "reuse")
            prompts = [[next(first), *scenes.draw(100 * number + i, rows - 1)] for i in range(batch)]
            if kind == "reuse":  # the first 64 rows are in host memory
                scenes.ask(engine, [prompt[:64] for prompt in prompts], tokens=1)
                engine.settle()
                engine.demote("host")
            watch.steps.clear()
            scenes.ask(engine, prompts, tokens=18 if kind == "prefill" else 6, logprobs=None)
            if number < len(batches):
                continue
            for name, counts in _typical(kind, batch, watch.steps):
                found.setdefault(f"{name} {batch}", {key: counts[key] for key in COLUMNS})
            most = max(most, *(step.counts["synchronisations"] for step in watch.steps))
            waits |= {line for step in watch.steps for what, line in step.lines if what == "synchronisations"}
    engine.close()
    return {"rows": found, "waits": sorted(waits), "most": most, "new": new}


def _typical(kind: str, batch: int, steps: list[Any]) -> list[Any]:
    """Choose steps in which the whole batch takes part: one with its prompts, and where nothing is reused, two that decode."""
    whole = [step for step in steps if step.runs == batch]
    found = [(kind, step.counts) for step in whole if step.rows > batch][:1]
    if kind == "reuse":
        return found
    decodes = [step.counts for step in whole if step.rows == batch]
    asked = [tuple(counts[key] for key in COLUMNS) for counts in decodes]
    # The first ones are no graphs yet, and the last one launches nothing.
    plain = decodes[asked.index(Counter(asked).most_common(1)[0][0])]
    leave = max(decodes, key=lambda counts: counts["copies to host"])
    return [("decode", plain), ("decode, blocks leave", leave), *found]


def counted(scene: str = "counts") -> dict[str, Any]:
    """Count in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [sys.executable, "-m", "tests.device.play", scene, "cuda", folder],
            capture_output=True, text=True, timeout=900, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def table(found: dict[str, Any]) -> str:
    """Draw the counts as a Markdown table."""
    lines = ["| step | requests | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * (len(COLUMNS) + 1)]
    batches = sorted({int(name.rpartition(" ")[2]) for name in found["rows"]})
    for kind, title in KINDS.items():
        for batch in batches:
            row = found["rows"].get(f"{kind} {batch}")
            if row is not None:
                lines.append(
                    f"| {title.format(**found)} | {batch} | " + " | ".join(str(row[key]) for key in COLUMNS) + " |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    result = counted("triton_counts" if os.environ.get("TRITON_INTERPRET") == "1" else "counts")
    print(table(result))
    print(f"\nwaiting function: {', '.join(result['waits'])}; most synchronisations of any step: {result['most']}")
