"""An environment of their own for frameworks: they may want other versions of what the product is built on."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
REQUIREMENTS = FOLDER / "requirements.txt"
# Nothing but the server under test is asked: no prices, no traces.
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "PYDANTIC_AI_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def python_with_frameworks() -> Path:
    """Make the environment, unless it was made before, and return its Python. Skips the test where packages cannot be had."""
    state = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"afterglow-frameworks-{getpass.getuser()}-{state}"
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, capture_output=True)
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--retries", "1"]
        made = subprocess.run(
            [python, "-m", "pip", "install", *options, "-r", REQUIREMENTS], capture_output=True, text=True, check=False
        )
        if made.returncode != 0:
            pytest.skip(f"the frameworks cannot be installed: {made.stderr.strip().splitlines()[-1]}")
        ready.touch()
    return python


def play(python: Path | str, framework: str, scenes: dict[str, tuple[str, str, str]]) -> dict[str, Any]:
    """Play scenes with a framework in a process of its own: {key: (scene, base URL, model)} to {key: value or error}."""
    keys = ("PATH", "HOME", "LANG", "TMPDIR", "SYSTEMROOT")
    done = subprocess.run(
        [python, FOLDER / "plays" / f"with_{framework}.py", json.dumps(scenes)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**{key: os.environ[key] for key in keys if key in os.environ}, **QUIET},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == scenes.keys()
    return dict(found)
