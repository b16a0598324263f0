"""Record the journals of this folder: `python -m tests.plan.journals.record [NAME ...]` from the project's root.

The plan is a function of its inputs, so a change of structure leaves the digests of recorded journals equal. Record again only
where a change of *behaviour* makes them differ, and say so in the commit.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from tests.plan.test_random import World

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.request import Breakpoint, Request, SamplingParams

FOLDER = Path(__file__).parent
VOCABULARY = 2048
SYSTEM = 130  # rows of the system prompt that all conversations share
FAULTS = (203, 206, 244, 260, 313, 329)  # seeds of random plans with failing tiers, of all policies
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def engine(folder: Path, **options: Any) -> Engine:
    """Start an engine on the bundled model that records to `folder/journal`, with a host tier of about 1,300 rows."""
    cache = {"device_cache": 2**23, "host_cache": 2**23, "disk_cache": 2**26, "cache_dir": folder / "cache"}
    cache |= {name: options.pop(name) for name in list(options) if name in CacheConfig.__dataclass_fields__}
    options = {"max_batch": 3, "journal": folder / "journal", "device": "cpu"} | options
    made = Engine.load(
        str(files("afterglow") / "assets" / "model"), EngineConfig(cache=CacheConfig(**cache), **options)
    )
    made.start()
    return made


def system_prompt() -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(3, VOCABULARY) for _ in range(SYSTEM)]


def talk(made: Engine, conversations: int, turns: int, cut: bool = False, marked: int = 0, **options: Any) -> None:
    """Hold conversations side by side, a turn of each at a time, with greedy replies. `cut`: truncate prompts that do not fit.
    `marked`: so many of them have breakpoints, behind the system prompt and at the end."""
    rng = random.Random(1)
    texts = [system_prompt() for _ in range(conversations)]
    ends = [[SYSTEM] for _ in texts]
    for turn in range(turns):
        for text in texts:
            text += [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(60, 150))]
        asked = []
        for i, text in enumerate(texts):
            more: dict[str, Any] = {"truncation": True, "turns": tuple(ends[i])} if cut else {}
            if i < marked:
                more["breakpoints"] = (Breakpoint(SYSTEM, 3600.0), Breakpoint(len(text), 300.0))
            session = f"talk-{i}" if i % 2 else None
            asked.append(Request(f"{turn}-{i}", list(text), GREEDY, session_id=session, **more, **options))
        for text, end, done in zip(texts, ends, made.generate(asked), strict=True):
            text += done.tokens
            end.append(len(text) - 1)
        made.settle()


def policy(name: str, folder: Path) -> None:
    made = engine(folder, policy=name, source="load")
    talk(made, conversations=6, turns=4)
    made.close()


def truncation(name: str, folder: Path) -> None:
    made = engine(folder, max_model_len=512, truncation_policy=name, write_policy="write_through")
    talk(made, conversations=3, turns=7, cut=True)
    made.close()


def prompts(folder: Path) -> None:
    """Registered prompts of the operator and of a tenant, one replaced, one forgotten; and a pinned conversation."""
    made = engine(folder)
    made.register_prefix("system", system_prompt(), salt=None)
    talk(made, conversations=2, turns=2, salt="a")
    made.register_prefix("own", [*system_prompt(), *range(100, 200)], salt="b")
    talk(made, conversations=2, turns=2, salt="b")
    made.pin_session("b", "talk-1", True)
    made.register_prefix("own", [*system_prompt(), *range(300, 350)], salt="b")
    talk(made, conversations=3, turns=3, salt="b")
    made.forget_prefix("own", salt="b")
    made.forget_session("a", "talk-1")
    talk(made, conversations=2, turns=1, salt="a")
    made.close()


def importance(folder: Path) -> None:
    """Requests that attend to a part of their prefix, beside such as do not, and after a restart."""
    lives = [folder / "first", folder / "second"]
    for life in lives:
        made = engine(folder, importance=0.5, source="load", write_policy="write_through", journal=life)
        talk(made, conversations=3, turns=3)
        talk(made, conversations=2, turns=4, kv_retention=1.0)
        made.close()
    (folder / "journal").write_text("".join(life.read_text() for life in lives))


def breakpoints(folder: Path) -> None:
    """Conversations with and without breakpoints, more than there is room for, and again after a restart."""
    lives = [folder / "first", folder / "second"]
    for life in lives:
        made = engine(folder, disk_cache=2**24, journal=life)
        talk(made, conversations=6, turns=4, marked=2)
        made.close()
    (folder / "journal").write_text("".join(life.read_text() for life in lives))


def world(seed: int, folder: Path) -> None:
    """The random plan of tests/plan/test_random.py: two lives of an engine, rows with identities, and faults."""
    made = World(seed)
    made.run(120)
    made.restart()
    made.run(120)
    made.drain()
    (folder / "journal").write_text("".join(f"{line}\n" for lines in made.journals for line in lines))


SCENES: dict[str, Callable[[Path], None]] = {
    "policy-lookahead": partial(policy, "lookahead"),
    "policy-lru": partial(policy, "lru"),
    "policy-fifo": partial(policy, "fifo"),
    "truncation-oldest": partial(truncation, "oldest"),
    "truncation-importance": partial(truncation, "importance"),
    "prompts": prompts,
    "importance": importance,
    "breakpoints": breakpoints,
    **{f"faults-{seed}": partial(world, seed) for seed in FAULTS},
}

if __name__ == "__main__":
    for name in sys.argv[1:] or SCENES:
        with tempfile.TemporaryDirectory() as folder:
            SCENES[name](Path(folder))
            (FOLDER / f"{name}.jsonl").write_text((Path(folder) / "journal").read_text())
            print(name, (FOLDER / f"{name}.jsonl").stat().st_size, flush=True)
