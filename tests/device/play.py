"""`python -m tests.device.play SCENE DEVICE FOLDER`: a scene's answer as JSON; `cuda` is pretended. `MODULE.SCENE`: of another file."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path

from tests.device import pretend

scene, device, folder = sys.argv[1:]
if device == "cuda":
    pretend.install()
module, _, name = scene.rpartition(".")
scenes = importlib.import_module(f"tests.device.{module or 'scenes'}")
logging.basicConfig(level=logging.INFO if module else logging.WARNING, stream=sys.stderr)
print(json.dumps(getattr(scenes, name)(device, Path(folder))))
