"""`python -m tests.device.mutations`: take each wait and each move out of the package, and see which scene notices.

Waits are `wait_stream`, `wait_event`, `synchronize`, and calls of `engine.transfers.wait`; moves are `.to(device)` and `.cpu()`. Each is removed
alone, in a process of its own, and the scenes run on the pretend device. A race, a refused operator, an index that is copied to
the device where it is used, or another answer than the CPU's notices it. Printed as a table; the exit status is the number that
nothing noticed.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "afterglow"
ROOMS = ("engine", "importance", "kernels", "memo", "model")
WAITS = {"wait_stream", "wait_event", "synchronize"}
WAIT = "wait"  # of `engine.transfers`: the one place where the host waits, and those who call it
SECONDS = 300  # a scene that hangs has noticed

INTERPRETED = "interpreted "  # before the name of a scene: with Triton's kernels, in its interpreter
SCENES = (
    *("races", "no_memory", "sending", "reuse", "importance", "renewing", "agreeing", "means", "scores", "drawing"),
    *(
        "grammar",
        "filled",
        "block_scenes.reuse",
        "read_ahead",
        "full_buffer",
        "memo_scenes.maps",
        "model_scenes.families",
    ),
    *(
        tuple(
            f"{INTERPRETED}{scene}"
            for scene in (
                "kernels",
                "stored",
                "block_scenes.products",
                "decode_scenes.racing",
                "decode_scenes.halves",
                "mixture",
            )
        )
        if find_spec("triton") is not None
        else ()
    ),
)
FIRST = {
    "left_out": "means",
    "importance": "agreeing",
    "selective": "agreeing",
    "scores": "scores",
    "sampling": "drawing",
    "transfers": "sending",
    "read_buffer": "read_ahead",
    "prefill_pass": f"{INTERPRETED}decode_scenes.halves",
    "device_blocks": "block_scenes.reuse",
    "device_products": "filled",
    "slot_gather": f"{INTERPRETED}stored",
    "triton_products": f"{INTERPRETED}block_scenes.products",
    "experts": f"{INTERPRETED}mixture",
    "triton": f"{INTERPRETED}stored",
    "memo/": "memo_scenes.maps",
    "model/": "model_scenes.families",
}

EQUAL: dict[str, str] = {  # sites whose removal changes nothing, and why
    "engine/cached_attention.py torch.cuda.synchronize(device)": "a stopwatch",
    "engine/engine.py torch.cuda.synchronize(self.decoder.device)": "an engine ends; what is unlocked then is not looked for",
    "engine/hardware.py torch.cuda.synchronize(device)": "a stopwatch",
    "kernels/device_products.py weight[at : at + ROUND_ROWS].cpu()": "a GPU may round otherwise; the pretend device does not",
}


SHORT = {  # ways to notice, by how their descriptions begin
    "Race": "a race",
    "Mismatch": "refused",
    "ModelError: ": "refused",
    "TypeError: can't convert cuda:0": "refused",
    "stopped: status 11": "code that is compiled for the CPU reads the device",
    "Indices": "indices copied where they are used",
    "kernels": "other launches",
    "AssertionError: ": "rows that are not handed over",
}


class Site(NamedTuple):
    """One wait or move. `text`: its source; `left`: what takes its place."""

    path: str
    line: int
    start: int
    stop: int
    text: str
    left: str

    @property
    def name(self) -> str:
        return f"{self.path} {self.text}"


def sites() -> Iterator[Site]:
    """Find all waits and moves in the source."""
    for path in sorted(path for room in ROOMS for path in (SRC / room).rglob("*.py")):
        source = path.read_bytes()
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call):
                left = _left(node, source)
                if left is not None:
                    start, stop = (
                        starts[line - 1] + column
                        for line, column in (
                            (node.lineno, node.col_offset),
                            (node.end_lineno or 0, node.end_col_offset or 0),
                        )
                    )
                    text = " ".join(source[start:stop].decode().split())
                    yield Site(str(path.relative_to(SRC)), node.lineno, start, stop, text, left)


def _left(node: ast.Call, source: bytes) -> str | None:
    """Return what takes a call's place; None for calls that are no wait and no move."""
    if isinstance(node.func, ast.Name):
        return "None" if node.func.id == WAIT else None
    if not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr in WAITS:
        return "None"
    arguments = " ".join(map(ast.unparse, node.args))
    if node.func.attr == "cpu" or (
        node.func.attr == "to" and ("device" in arguments or arguments in ("where", "'cpu'"))
    ):
        return f"({ast.unparse(node.func.value)})"
    return None


def outcome(site: Site | None, scene: str, device: str, folder: Path) -> Any:
    """Run a scene in a process of its own, without `site`: its answer, or what stopped it.

    The process is a fork of this one, which must not have computed anything yet: forks lack the threads that compute.
    """
    folder.mkdir()
    result = folder / "result"
    child = os.fork()
    if child == 0:
        _run(site, scene, device, folder / "cache", result)
    _, status = os.waitpid(child, 0)
    if not result.exists():
        return f"stopped: status {status}"
    return json.loads(result.read_text())


def apart(expression: str) -> Any:
    """Evaluate an expression of this module in a process that has imported the package, and done nothing else."""
    code = f"from tests.device.mutations import *; print(json.dumps({expression}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=SECONDS)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout)


def _run(site: Site | None, scene: str, device: str, folder: Path, result: Path) -> None:
    """Run a scene, write its answer, and end the process."""
    import signal

    signal.alarm(SECONDS)
    os.dup2(os.open(folder.parent / "log", os.O_CREAT | os.O_WRONLY), 2)
    try:
        if site is not None:
            _remove(site)
        if scene.startswith(INTERPRETED):
            os.environ["TRITON_INTERPRET"] = "1"
            scene = scene.removeprefix(INTERPRETED)
        if device == "cuda":
            from tests.device import pretend

            pretend.install()
        module, _, name = scene.rpartition(".")
        found = getattr(importlib.import_module(f"tests.device.{module or 'scenes'}"), name)(device, folder)
        if not isinstance(found, dict):
            found = {"races": [], "answers": found}
        found["indices"] = _indices()
        result.write_text(json.dumps(found))
    except BaseException as error:
        traceback.print_exc()
        result.write_text(json.dumps(f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"))
    os._exit(0)


def _indices() -> list[str]:
    """List the functions that index the device's memory by the host's numbers, which copies them each time, and waits."""
    from tests.device.watching import watch

    return sorted(line for what, line in watch.lines if what == "indices from the host")


def _remove(site: Site) -> None:
    """Have the import of a file see it without the site."""
    whole = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> Any:
        if Path(self.path) != SRC / site.path:
            return whole(self, name)
        source = Path(self.path).read_bytes()
        return compile(source[: site.start] + site.left.encode() + source[site.stop :], self.path, "exec")

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


class Scenes:
    """Run scenes, and compare their answers with the CPU's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._expected: dict[str, Any] = {}

    def expected(self, scene: str) -> Any:
        """Return the CPU's answer, once the whole package has given it on the device too."""
        if scene not in self._expected:
            theirs = outcome(None, scene, "cpu", self._folder / f"cpu-{scene}")
            ours = outcome(None, scene, "cuda", self._folder / f"cuda-{scene}")
            for found in (theirs, ours):
                assert not isinstance(found, str), (scene, found)
            assert tokens(ours) == tokens(theirs), (scene, tokens(ours), tokens(theirs))
            assert not ours["races"], ours["races"]
            assert not ours["indices"], ours["indices"]
            self._expected[scene] = tokens(theirs), counts(ours)
        return self._expected[scene]

    def noticed(self, site: Site) -> tuple[str, str] | None:
        """Find the first scene that fails without the site, and how."""
        first = next((scene for part, scene in FIRST.items() if part in site.path), SCENES[0])
        for scene in dict.fromkeys((first, *SCENES)):
            expected = self.expected(scene)
            folder = self._folder / f"{site.path.replace('/', '-')}-{site.start}-{scene}"
            found = outcome(site, scene, "cuda", folder)
            if isinstance(found, str):
                return scene, _cause(folder) or found
            if found["races"]:
                return scene, f"Race: {found['races'][0]}"
            if found["indices"]:
                return scene, f"Indices are copied in {', '.join(found['indices'])}"
            if tokens(found) != expected[0]:
                return scene, "other answers than the CPU's"
            if counts(found) != expected[1]:
                return scene, "kernels of Triton's are launched more or less often"
        return None


def _cause(folder: Path) -> str | None:
    """Find what the device refused in a scene's log."""
    lines = (folder / "log").read_text(errors="replace").splitlines()
    return next((line.split(".")[-1] for line in lines if line.startswith("tests.device.pretend.Mismatch")), None)


def tokens(found: Any) -> Any:
    """Take the tokens from a scene's answer."""
    replies = [each for each in found["answers"] if isinstance(each, list)]
    return [each[0] if each and isinstance(each[0], list) else each for each in replies]


def counts(found: Any) -> Any:
    """Take from a scene's answer how often kernels were launched."""
    return [each for each in found["answers"] if isinstance(each, int)]


def main(*wanted: str) -> int:
    """Print the table. `wanted`: parts of the names of sites; none: all."""
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scenes = Scenes(folder)
        chosen = [
            site
            for site in sites()
            if (not wanted or any(part in site.name for part in wanted)) and site.name not in EQUAL
        ]
        print("| file | removed | scene | noticed as |\n|---|---|---|---|", flush=True)
        for site in chosen:
            found = scenes.noticed(site)
            missed += found is None
            scene, how = found or ("nothing", "")
            short = next((text for part, text in SHORT.items() if how.startswith(part)), how)
            print(f"| {site.path} | `{site.text}` | `{scene}` | {short} |", flush=True)
            print(f"{site.path}:{site.line}: {how}", file=sys.stderr, flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
