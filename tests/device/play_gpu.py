"""`python -m tests.device.play_gpu OPTIONS...`: `benchmarks/gpu.sh` in one process, on the pretend device."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from tests.device import pretend

pretend.install()
sys.modules["vllm"] = None  # type: ignore[assignment]  # as if it were absent: no device is pretended to it

from benchmarks.gpu import __main__ as runner  # noqa: E402
from benchmarks.gpu.part import run  # noqa: E402
from benchmarks.gpu.setting import Setting  # noqa: E402


def start(name: str, file: Path, shape: str) -> str | None:
    """Run a part in this process."""
    try:
        with pretend.active():
            run(name, file, Setting(shape == "tiny", tests_on="--pretend-device"))
    except Exception as error:
        traceback.print_exc()
        return repr(error)
    return None


sys.exit(runner.main(sys.argv[1:], start))
