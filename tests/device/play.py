"""`python -m tests.device.play SCENE DEVICE FOLDER`: a scene's answer as JSON; `cuda` is pretended."""

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
scenes = importlib.import_module("tests.device.scenes")
logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
print(json.dumps(getattr(scenes, scene)(device, Path(folder))))
