"""What the papers print about measured goals, for docs/papers.md. A goal that they print nothing comparable about has no entry.

Ratios are of printed values: CachedAttention's Table 1 has perplexities of 5.47 and 5.48 for WikiText-2 with LLaMA-7B (0.998).
"""

from __future__ import annotations

import re

# Of RelayAttention, requests/s of relay over those of sharing, on an A40: Fig. 6 (LLaMA-2-7B), Table 3 (as times), Fig. 8.
RELAY_GAINS = {
    ("ShareGPT", 64): 4.20 / 4.06,
    ("ShareGPT", 512): 4.15 / 3.26,
    ("ShareGPT", 2048): 3.97 / 1.90,
    ("MMLU, 1-shot", 120): 675 / 621,
    ("MMLU, 3-shot", 360): 752 / 629,
    ("MMLU, 5-shot", 600): 850 / 641,
    ("256 + 512", 2048): 2.00 / 0.93,
}

# Files, goals (regular expressions), and what is printed.
PRINTED = (
    ("overflow|truncation", r"^perplexity CA / TT: ", "0.997 to 1.002"),
    ("overflow|truncation", r"^perplexity NKVT / TT", "245 to 401"),
    ("choices|truncation", r"^points that CA loses", "-0.3 to 0.9"),
    ("preload", r"^Fig. 19, event simulation: PL-B0", "0.35"),
    ("preload", r"^Fig. 19, event simulation: PL-B15", "0.61"),
    ("placement", r"^backlog: hit rate, look-ahead - lru", "27 and 28"),
    ("placement", r"^backlog: hit rate, look-ahead - fifo", "31 and 38"),
    ("placement", r"^backlog: look-ahead's hits from host", "0.996"),
    ("relay_operator", r"^gain at prefix 2048, batch 32, 12 KV heads, of theory", "0.87 (9.56 of 10.94)"),
    ("importance_(io|wide)", r"TTFT, H2O with LFU over SPEC", "1.2 to 2.8"),
    ("importance_(io|wide)", r"slowest, H2O with LFU over SPEC", "2.0 (5.9 s, 2.9 s)"),
    ("importance_(io|wide|sweep)", r"waiting for I/O, H2O with LFU over SPEC", "1.5 to 3.8"),
    ("importance_(io|wide|sweep)", r"identification, share of TTFT", "0.06"),
    ("importance_(io|wide)", r"mapping, share of TTFT", "under 0.02"),
    ("importance_(io|wide)", r"extra storage", "0.012"),
    ("importance_(io|wide)", r"\+(ITF|RO|SC): TTFT over the step before", "under 1"),
    ("importance_quality", r"scored: points of recall lost", "under 1 (accuracy)"),
    ("importance_quality", r"^identification's share", "0.06"),
    ("importance_real", r"points of accuracy lost", "under 1"),
    ("attncache_(sts|decoder)", r"^hit rate, as published", "0.3"),
    ("attncache_(sts|decoder)", r"^points lost at it, as published", "0.9 to 2.3"),
    ("attncache_(sts|decoder)", r"^loss of AttnCache-f over", "0.5 to 0.9"),
    ("attncache_shapes", r"^attention speed-up at a hit rate of 0.3", "1.19 to 1.21"),
    ("attncache_shapes", r"^search and projection", "under 0.02"),
    ("attncache_shapes", r"^search of [0-9,]+ vectors", "under 0.5 (100,000)"),
)


def relay_gain(workload: str, batch: int, prefix: int) -> float | None:
    """Look up what relay gains over sharing in the paper. None where it prints nothing: those are batches of 32 requests and more."""
    gain = RELAY_GAINS.get((workload, prefix)) if batch >= 32 else None
    return None if gain is None else round(gain, 2)


def printed(file: str, name: str) -> str:
    """Look up what the paper prints about a goal of a file. Empty for nothing."""
    if name.startswith("relay : sharing, "):
        *workload, batch, prefix = name.removeprefix("relay : sharing, ").split(", ")
        gain = relay_gain(", ".join(workload), int(batch.split()[1]), int(prefix.split()[1]))
        return "" if gain is None else f"{gain:.2f}"
    found = (text for files, goals, text in PRINTED if re.fullmatch(files, file) and re.search(goals, name))
    return next(found, "")
