"""How a worker talks with the benchmark: a line of JSON for a line of JSON, over stdin and stdout. Standard library only.

First the worker says `{"ready": true, "settings": {...}}`. Then each line `{"prompts": [[id, ...], ...], "new": n, "mode": name}` is
answered with `{"tokens": [[id, ...], ...], "stamps": [[seconds, ...], ...]}`: for each prompt its new tokens, and when each
was there, in seconds since the line was understood. An exception ends the worker, after `{"error": text}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Answer = tuple[list[list[int]], list[list[float]]]  # tokens, and moments of time.perf_counter()
Generate = Callable[[list[list[int]], int, str], Answer]


def serve(start: Callable[[], tuple[Generate, dict[str, Any]]]) -> None:
    """Answer until stdin ends. Libraries print what they like: they get stderr as their stdout."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(what: dict[str, Any]) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    try:
        generate, settings = start()
        say({"ready": True, "settings": settings})
        for line in sys.stdin:
            asked = json.loads(line)
            began = time.perf_counter()
            tokens, moments = generate(asked["prompts"], asked["new"], asked.get("mode", ""))
            stamps = [[round(moment - began, 6) for moment in each] for each in moments]
            say({"tokens": tokens, "stamps": stamps})
    except BaseException as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
        raise
