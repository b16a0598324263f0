"""A program that ends without closing its engine ends well, and what was computed is kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import time
from pathlib import Path

from afterglow import Engine, EngineConfig, Request, SamplingParams
from afterglow.config import CacheConfig
from afterglow.library.locate import BUNDLED, find_model

cache = CacheConfig(cache_dir=Path(sys.argv[1]), disk_cache=1 << 26, device_cache=1 << 26, host_cache=1 << 26)
engine = Engine.load(find_model(BUNDLED), EngineConfig(cache=cache))
engine.start()
prompt = list(range(10, 210))
(done,) = engine.generate([Request("a", prompt, SamplingParams(max_tokens=1))])
print(done.cached.total)
engine.submit(Request("b", prompt, SamplingParams(max_tokens=900, ignore_eos=True)), lambda output: None)
time.sleep(0.2)
"""


def test_a_program_that_does_not_close_its_engine(tmp_path: Path) -> None:
    """It ends in the middle of a step, which used to abort it, and the next one finds the rows on disk."""
    for cached in (0, 199):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{cached}\n", done.stderr
