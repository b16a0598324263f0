"""Print the files that a chat request passes through, in order: `python -m scripts.walk`.

A server and an engine on the bundled model run in this process under a profiler. Three walks: a streamed turn of a conversation,
the rows of the conversation on their way to disk, and a turn whose rows come back from disk. A file counts where one of its
functions is called on the walk; the steps of an idle engine and of other threads at that moment count as well.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

PACKAGE = Path(str(files("afterglow")))


class Walk:
    """Record the files of the package whose functions are called, in the order of first calls."""

    def __init__(self) -> None:
        self.files: dict[str, None] | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.files is not None and event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.files[str(Path(frame.f_code.co_filename).relative_to(PACKAGE))] = None

    def of(self, action: Callable[[], object]) -> list[str]:
        """Return the files that `action` passes through."""
        self.files = {}
        action()
        found, self.files = list(self.files), None
        return found


def main() -> None:
    """Print the three walks."""
    walk = Walk()
    threading.setprofile(walk)
    from afterglow.config import CacheConfig, EngineConfig
    from afterglow.engine.engine import Engine
    from afterglow.server.lifecycle.service import Service
    from afterglow.server.server_config import ServerConfig
    from afterglow.text import Tokenizer

    model = PACKAGE / "assets" / "model"
    with tempfile.TemporaryDirectory() as folder:
        cache = CacheConfig(
            cache_dir=Path(folder), device_cache=2**26, host_cache=2**26, disk_cache=2**26, source="load"
        )
        engine = Engine.load(model, EngineConfig(threads=1, cache=cache))
        engine.start()
        service = Service(engine, Tokenizer(model), ServerConfig(port=0, grace=0.5), model)
        thread = threading.Thread(target=service.run, kwargs={"signals": False})
        thread.start()
        while not service.started:
            threading.Event().wait(0.01)
        messages = [{"role": "user", "content": "My name is Ada. I keep the red kite in the old mill near the river."}]

        def turn() -> None:
            body = {"messages": messages, "stream": True, "temperature": 0, "max_tokens": 8}
            answer = httpx.post(f"{service.address}/v1/chat/completions", json=body).raise_for_status().text
            pieces = [line.partition('"content":"')[2].partition('"')[0] for line in answer.splitlines()]
            messages.append({"role": "assistant", "content": "".join(pieces)})
            messages.append({"role": "user", "content": "What is my name?"})
            engine.settle()

        turn()
        walks = {
            "a turn of a conversation": walk.of(turn),
            "its rows to disk": walk.of(lambda: engine.demote("disk")),
            "a turn whose rows come from disk": walk.of(turn),
        }
        service.stop()
        thread.join()
        engine.close()
    for name, found in walks.items():
        rooms = sorted({path.partition("/")[0] for path in found})
        print(f"{name}: {len(found)} files of {len(rooms)} rooms ({', '.join(rooms)})", *found, "", sep="\n")


if __name__ == "__main__":
    main()
