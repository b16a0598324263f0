"""How likely llama.cpp finds given tokens: losses of the second half of each window. Runs in llama.cpp's environment.

    python -m benchmarks.peers.workers.score_llama OPTIONS < WINDOWS > LOSSES

OPTIONS are those of `run_llama`, as JSON. WINDOWS is JSON: lists of token ids, all of one length. LOSSES is JSON: for each window the
natural-log losses of the tokens from its middle on, each after all before it.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np

from benchmarks.peers.workers.run_llama import Runner


def losses(runner: Runner, window: list[int]) -> list[float]:
    middle, last = len(window) // 2, len(window) - 1
    rows = [(token, place, 0, place >= middle - 1) for place, token in enumerate(window[:last])]
    logits = runner.logits(rows).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    totals = np.log(np.exp(logits).sum(-1))
    return [float(x) for x in totals - logits[np.arange(len(logits)), window[middle:]]]


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # llama.cpp prints what it likes
    runner = Runner(json.loads(sys.argv[1]))
    json.dump([losses(runner, window) for window in json.load(sys.stdin)], out)
    out.flush()


if __name__ == "__main__":
    main()
