"""The parts, in the order in which they run. Imports nothing that computes: the runner only needs their names."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """A function of a module, which takes the setting, the ceilings, and these arguments."""

    module: str
    function: str
    arguments: tuple[int | str, ...] = ()


SUITES = (
    "engine/test_relay",
    "engine/test_selecting_beside",
    "engine/test_truncation",
    "engine/test_no_memory",
    "engine/test_quantized",
    "engine/test_eight_bits",
    "faults/test_engine_faults",
)
# Suites that would take too long for one part, by the tiers of their tests.
EXACT, SELECTING = "tests/engine/test_exact_reuse.py", "tests/engine/test_selecting.py"
MEMORY, DISK = "device or host", "disk or restart"
SYSTEMS = (64, 512, 2048)

PARTS: dict[str, Part] = {
    "tests-exact_reuse-memory": Part("device_tests", "suite", (EXACT, MEMORY)),
    "tests-exact_reuse-disk": Part("device_tests", "suite", (EXACT, f"not ({MEMORY})")),
    "tests-selecting-memory": Part("device_tests", "suite", (SELECTING, MEMORY)),
    "tests-selecting-disk": Part("device_tests", "suite", (SELECTING, f"({DISK}) and not ({MEMORY})")),
    "tests-selecting-others": Part("device_tests", "suite", (SELECTING, f"not ({MEMORY} or {DISK})")),
    **{f"tests-{name.split('test_')[1]}": Part("device_tests", "suite", (f"tests/{name}.py",)) for name in SUITES},
    "decode": Part("decode", "decode"),
    "prefill": Part("decode", "prefill"),
    "reuse": Part("loading", "reuse"),
    "preloading": Part("loading", "preloading"),
    "saving": Part("loading", "saving"),
    "documents": Part("documents", "documents"),
    "relay-operator": Part("relay", "operator"),
    **{f"relay-throughput-{system}": Part("relay", "throughput", (system,)) for system in SYSTEMS},
    **{f"relay-lengths-{system}": Part("relay", "lengths", (system,)) for system in SYSTEMS},
    "selection": Part("selection", "selection"),
    "maps": Part("maps", "layers"),
    "vllm": Part("vllm", "beside"),
}
