"""Quantised models in Afterglow and in llama.cpp: the same files, the same cores, taking turns; from opening a file to a restart.

Afterglow opens each GGUF file as it is, and rounds the unquantised checkpoint itself (int8, int4). llama.cpp opens the same files,
each with those of its flags that are quickest for it. An engine runs alone, in a process of its own, for one life: it opens the model, goes on
with the conversation of its last life, answers one prompt and eight at once, goes on with a conversation, and closes. Lives take turns. Decoding
of one sequence is measured once more with both engines open, in turns of a second.

    python -m benchmarks.peers.quantized [--model NAME ...] [--environments DIR] [--work DIR] [--quick] [--json FILE]

The first run writes the files (8 GB; --work keeps them). docs/compare.md explains settings and differences.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from afterglow.bench.report import arguments, commit, finish
from afterglow.errors import AfterglowError
from benchmarks.peers import environments, plan
from benchmarks.peers.compare import Said
from benchmarks.peers.processes import PeerError, ended_by_signals
from benchmarks.peers.quantized import tables
from benchmarks.peers.quantized.bounds import bandwidth, bytes_per_token
from benchmarks.peers.quantized.flags import tried
from benchmarks.peers.quantized.lives import BUDGETS, Arm, Lived, live
from benchmarks.peers.quantized.models import MODELS, ModelFiles
from benchmarks.peers.quantized.pairs import decoded_in_turns
from benchmarks.peers.rounds import measured, turns

LLAMA = "llama-cpp"
ROUNDED = ("int8", "int4")
ROUNDS = {True: 3, False: 5}  # lives of each arm, by --quick: the first one finds nothing in memory
UNITS = {"load": "s", "load, first": "s", "resident": "bytes", "peak": "bytes"}

Rows = list[dict[str, Any]]


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.peers.quantized", __doc__ or "")
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=tuple(MODELS), help="default: all")
    parser.add_argument("--lives", type=int, metavar="N", help="of each arm; default: 5, with --quick 3")
    parser.add_argument("--kind", nargs="+", metavar="KIND", help="only these, such as Q4_0 or int8; default: all")
    parser.add_argument(
        "--environments", type=Path, metavar="DIR", help="folder of the peers' environments; default: .peers"
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep models and logs here; default: a temporary folder"
    )
    options = parser.parse_args(args)
    try:
        return _run(options)
    except AfterglowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(options: Any) -> int:
    where = environments.folder(options.environments)
    present, absent = plan.found((LLAMA,), where)
    if absent:
        print(f"error: {absent[LLAMA]}", file=sys.stderr)
        return 1
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="afterglow-peers-") as temporary:
        work = (options.work or Path(temporary)).resolve()
        doing = plan.Plan(
            peers=(LLAMA,),
            environments=where,
            folder=Path(temporary).resolve(),
            seed=options.seed,
            quick=options.quick,
            cores=tuple(sorted(os.sched_getaffinity(0))[: options.threads]),
            vllm_compiled=False,
            wait_policy="default",
            say=Said(),
        )
        speed = bandwidth(doing.threads)
        rows: Rows = []
        models: dict[str, Any] = {}
        for name in options.model:
            more, models[name] = _model(
                doing, MODELS[name](work / "models", where, options.seed), options.kind, options.lives
            )
            rows += more
    bounds = {name: {kind: speed / size for kind, size in found["read"].items()} for name, found in models.items()}
    tables.show_all(rows, bounds)
    print(f"memory is read at {speed / 1e9:.1f} GB/s by {doing.threads} threads: the bound of decoding one sequence")
    settings = plan.settings(doing) | {"kv_dtype": "float32 (Afterglow), float16 (llama.cpp): their defaults"}
    facts = {"versions": present, "settings": settings, "budgets": BUDGETS, "bandwidth": round(speed), "bounds": bounds}
    finish(options, rows, tables.goals(rows, models), models=models, **facts)
    return 1 if any(found["left out"] for found in models.values()) else 0


def _model(
    doing: plan.Plan, files: ModelFiles, kinds: list[str] | None, lives: int | None
) -> tuple[Rows, dict[str, Any]]:
    """All arms of a model, and what is worth knowing of them."""
    began = time.monotonic()
    formats = [name for name in files.formats if kinds is None or name in kinds]
    paths = {name: files.gguf(name) for name in formats}
    arms = [Arm("afterglow", kind, path, files.vocab) for kind, path in paths.items()]
    arms += [
        Arm("afterglow", kind, files.checkpoint(), files.vocab, rounding=True)
        for kind in ROUNDED
        if kinds is None or kind in kinds
    ]
    sets: Rows = []
    for kind, path in paths.items():
        arm, found = tried(doing, Arm(LLAMA, kind, path, files.vocab))
        arms.append(arm)
        sets += found
    lived, left_out = _lives(doing, arms, lives or ROUNDS[doing.quick])
    both = {kind: [arm for arm in arms if arm.kind == kind and arm.name in lived] for kind in formats}
    in_turns = {kind: decoded_in_turns(doing, pair[0], pair[1]) for kind, pair in both.items() if len(pair) == 2}
    doing.say(f"{files.name}: {len(lived)} arms")
    rows = [
        measured("quantized", samples, model=files.name, engine=arm.engine, kind=arm.kind, measure=measure)
        | {"unit": UNITS.get(measure, "s" if measure.startswith("ttft") else "tokens/s")}
        for arm in arms
        if arm.name in lived
        for measure, samples in lived[arm.name].samples.items()
    ]
    return rows, {
        "commit": commit(),
        "seconds": round(time.monotonic() - began),
        "flags": sets,
        "chosen": {arm.name: dict(arm.flags) for arm in arms if arm.engine == LLAMA},
        "bytes": {kind: path.stat().st_size for kind, path in paths.items()},
        "read": {kind: bytes_per_token(path) for kind, path in paths.items()},
        "first tokens": _agreement(lived, formats),
        "decode in turns": in_turns,
        "settings": {name: found.settings for name, found in lived.items()},
        "left out": left_out,
    }


def _lives(doing: plan.Plan, arms: list[Arm], rounds: int) -> tuple[dict[str, Lived], dict[str, str]]:
    """Lives in turn. An arm that fails is left out, with the reason."""
    by_name = {arm.name: arm for arm in arms}
    lived, left_out = {name: Lived() for name in by_name}, {}
    for number, name in turns(list(by_name), rounds):
        if name in lived:
            try:
                live(doing, by_name[name], number, lived[name])
            except PeerError as error:
                doing.say(f"{name} is left out: {error}")
                left_out[name] = str(error).splitlines()[0]
                del lived[name]
    return lived, left_out


def _agreement(lived: dict[str, Lived], kinds: list[str]) -> dict[str, str]:
    """How many answers of both engines begin with the same token: they multiply in 8 bits, each in its own way."""
    said = {}
    for kind in kinds:
        ours, theirs = lived.get(f"afterglow {kind}"), lived.get(f"{LLAMA} {kind}")
        if ours and theirs:
            same = sum(a == b for a, b in zip(ours.firsts, theirs.firsts, strict=True))
            said[kind] = f"{same} of {len(ours.firsts)}"
    return said


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
