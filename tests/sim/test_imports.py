"""The simulator starts where neither torch nor numpy is installed."""

from __future__ import annotations

import subprocess
import sys

CHECK = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "safetensors", "tokenizers", "starlette", "transformers"):
            raise ModuleNotFoundError(f"{name} is not installed", name=name)
        return None

sys.meta_path.insert(0, Absent())
import afterglow.sim
names = [m.name for m in pkgutil.walk_packages(afterglow.sim.__path__, "afterglow.sim.")]
for name in names:
    importlib.import_module(name)
from afterglow.sim.machine.catalogue import all_hardware, all_models, all_prices
from afterglow.sim.workload.turns import Workload, token_bytes
from afterglow.sim.workload.sharegpt import ShareGPT, preset
first = Workload(ShareGPT(preset("sharegpt-atc"))).take(100.0)[0].turn
assert len(token_bytes(first.prompt)) == 4 * first.prompt_tokens
assert all_hardware() and all_models() and all_prices()
assert "torch" not in sys.modules and "numpy" not in sys.modules
print(len(names))
"""


def test_every_module_works_without_torch_and_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 8
