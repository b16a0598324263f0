"""Times of forward passes and transfers on this machine, as a file for `afterglow simulate --calibration`.

Conversations of many lengths take turns, one at a time and several at once, on tiers too small for all conversations, while the
engine keeps its journal; passes and transfers are fitted to the journal's times. `--journal` fits one that
a server has written (`afterglow serve --journal FILE`) instead.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from afterglow.bench.report import arguments, show, writable_folder, write_json
from afterglow.bench.timed_requests import ask, running, words
from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.errors import ConfigError
from afterglow.sim.machine.calibration import calibrate
from afterglow.sim.machine.timing import Calibration

TALKS = 8
BATCHES = (1, 2, 4, 8)


def main(args: Sequence[str]) -> int:
    """`afterglow bench calibrate`."""
    parser = arguments("afterglow bench calibrate", (__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="bench-100m", help="preset or model directory (default bench-100m)")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest context (default 1024)")
    parser.add_argument("--cache-dir", type=writable_folder, help="folder of the disk tier (default: a temporary one)")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="fit this journal, and run nothing")
    options = parser.parse_args(args)
    if options.longest < 256:
        raise ConfigError(f"--longest must be at least 256, got {options.longest}")
    with tempfile.TemporaryDirectory(prefix="afterglow-bench-", dir=options.cache_dir) as folder:
        found = _calibration(options, Path(folder))
    prefill, decode = found.timing.prefill, found.timing.decode
    show(
        f"{found.model}: seconds",
        ("", "fixed", "per row or job", "per million products, thousand rows", "per row gathered"),
        [("prefill", *prefill), ("decode", *decode, "")],
    )
    show("disk", ("", "MB/s"), [("read", found.disk_read / 1e6), ("write", found.disk_write / 1e6)])
    if options.json is not None:
        write_json(options.json, found.packed())
    else:
        print("--json FILE keeps it, for `afterglow simulate --calibration FILE`")
    return 0


def _calibration(options: Any, folder: Path) -> Calibration:
    if options.journal is not None:
        found = _fitted(options.journal, options.model)
        with _engine(options.model, options.longest, folder, options.threads, disk_cache=0) as probe:
            return replace(found, kv_bytes_per_token=_row_bytes(probe))
    return measured_calibration(options.model, options.longest, options.seed, folder, options.threads, options.quick)


def measured_calibration(
    model: str, longest: int, seed: int, folder: Path, threads: int | None = None, quick: bool = False
) -> Calibration:
    """Run conversations of up to `longest` tokens in `folder`, and fit what their journal says."""
    with _engine(model, longest, folder / "probe", threads, disk_cache=0) as probe:
        row = _row_bytes(probe)
    rows = longest * row
    journal = folder / "journal.jsonl"
    room = {"device_cache": 3 * rows, "host_cache": 4 * rows, "disk_cache": 64 * rows}
    with _engine(model, longest, folder / "cache", threads, journal, **room) as engine:
        for part in range(1 if quick else 3):
            _talk(engine, random.Random(f"{seed} {part}"), longest)
    return calibrate(_lines(journal), model, row)


def _row_bytes(engine: Engine) -> int:
    return engine.stats().tiers.host.capacity // engine.capacity.host_slots // engine.capacity.block_rows


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _fitted(journal: Path, model: str) -> Calibration:
    """Fit what a server's journal says, before a model is loaded for the size of its rows. Raises: ConfigError."""
    try:
        return calibrate(_lines(journal), model, 0)
    # A line may be JSON and no journal's. UnicodeDecodeError is a ValueError.
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"--journal {journal} is no whole journal (serve --journal writes one): {error}") from error


def _engine(
    model: str, longest: int, folder: Path, threads: int | None, journal: Path | None = None, **cache: Any
) -> AbstractContextManager[Engine]:
    settings = CacheConfig(cache_dir=folder, source="load", warm_start=False, **cache)
    config = EngineConfig(
        speculate="off",
        cache=settings,
        threads=threads,
        max_model_len=2 * longest,
        max_batch=max(BATCHES),
        journal=journal,
    )
    return running(model, config)


def _talk(engine: Engine, rng: random.Random, longest: int) -> None:
    """Conversations whose turns add from a few to hundreds of tokens, in batches of several sizes."""
    texts: list[list[int]] = [[] for _ in range(TALKS)]
    for batch in (*BATCHES, *reversed(BATCHES)):
        order = rng.sample(range(TALKS), TALKS)
        for first in range(0, TALKS, batch):
            turns = []
            for number in order[first : first + batch]:
                text = texts[number]
                room = longest - len(text) - 32
                if room < 16:
                    text.clear()
                    room = longest - 32
                text += words(rng, engine, min(room, int(16 * 2 ** rng.uniform(0, 5))))
                turns.append((text, ask(engine, list(text), rng.randrange(8, 32))))
            for text, turn in turns:
                turn.ended.wait()
                text += turn.tokens
