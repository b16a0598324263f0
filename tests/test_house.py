"""The house in numbers: import circles, sizes of files, names, words. Source is parsed, never imported.

Limits only ever shrink. An exception stands in a table here, with its reason.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "afterglow"
TESTS = ROOT / "tests"

CIRCLES: list[list[str]] = []

MAX_LINES = 400
LONG_FILES: dict[str, str] = {}  # path in src/afterglow: reason

SAME_CLASS: dict[str, str] = {}  # class name: why two classes have it
SAME_FILE: dict[str, str] = {
    "cache.py": "the plan's cache, and its endpoints",
    "disk.py": "the disk tier: planned, carried out, and measured",
    "engine.py": "the engine, and its benchmark",
    "options.py": "options of a room, light to import",
    "stats.py": "the plan's counters, and the engine's, which contain them",
    "turns.py": "turns of a conversation, as text and as lengths",
}  # file name: why two files have it

MAX_PLAN_ENTRIES = 10

VAGUE_WORDS = re.compile(r"\b(who|whom|some|no|any|every)(ever|body)\b|Error[s]:", re.IGNORECASE)
VAGUE: dict[str, int] = {
    "benchmarks": 3,
    "memo": 4,
    "store": 3,
    "tests/memory": 1,
    "tests/store": 4,
}  # room: how many are left

PRIVATE_ACCESSES = 18  # `._name` of other objects in tests, outside doors.py files


def modules() -> dict[str, Path]:
    """Return the files of the package by module name."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = ["afterglow", *path.relative_to(SRC).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of the package that a file imports, those under TYPE_CHECKING and in functions included."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return found & known.keys()


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other (strongly connected components of two or more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(arrows[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(arrows):
        if name not in index:
            visit(name)
    return found


def test_the_search_for_circles_finds_one() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_no_imports_go_in_a_circle() -> None:
    """Imports for annotations count, and so do those inside functions."""
    known = modules()
    assert circles({name: imports_of(path, known) - {name} for name, path in known.items()}) == CIRCLES


def test_files_are_short() -> None:
    lines = {str(path.relative_to(SRC)): len(path.read_text().splitlines()) for path in modules().values()}
    assert {name: size for name, size in lines.items() if size > MAX_LINES and name not in LONG_FILES} == {}
    assert {name for name in LONG_FILES if lines.get(name, 0) <= MAX_LINES} == set(), "no longer an exception"


def class_names() -> dict[str, list[str]]:
    found = defaultdict(list)
    for name, path in modules().items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name)
    return found


def test_a_class_name_means_one_thing() -> None:
    twice = {name: places for name, places in class_names().items() if len(places) > 1}
    assert {name: places for name, places in twice.items() if name not in SAME_CLASS} == {}
    assert SAME_CLASS.keys() - twice.keys() == set(), "no longer an exception"


def test_a_file_name_means_one_thing() -> None:
    found = defaultdict(list)
    for path in modules().values():
        if path.name not in ("__init__.py", "__main__.py"):
            found[path.name].append(str(path.relative_to(SRC)))
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert {name: places for name, places in twice.items() if name not in SAME_FILE} == {}
    assert SAME_FILE.keys() - twice.keys() == set(), "no longer an exception"


def test_the_plan_reads_at_one_glance() -> None:
    entries = [path.name for path in (SRC / "plan").iterdir() if not path.name.startswith("__")]
    assert len(entries) <= MAX_PLAN_ENTRIES, sorted(entries)


# ---- words


def texts() -> Iterator[Path]:
    for folder in ("src", "tests", "benchmarks", "scripts", "docs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".c", ".h", ".toml", ".html") and path != Path(__file__):
                yield path
    yield from sorted(ROOT.glob("*.md"))


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[2:3] if parts[0] == "src" else parts[:2] if parts[0] == "tests" else parts[:1])


def test_texts_say_who_and_what() -> None:
    """A sentence names its subject, and errors stand under `Raises:`."""
    counts: Counter[str] = Counter()
    for path in texts():
        counts[room_of(path)] += len(VAGUE_WORDS.findall(path.read_text()))
    assert {room: count for room, count in counts.items() if count > VAGUE.get(room, 0)} == {}


# ---- tests


def test_every_folder_of_tests_is_a_package() -> None:
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def private_accesses(path: Path) -> Iterator[int]:
    """Yield the lines where a file uses a member `._name` of an object of ours that is not `self`, `cls` or `super()`."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and node.attr != "_replace":
            owner: ast.expr = node.value
            while isinstance(owner, ast.Attribute | ast.Call):
                owner = owner.func if isinstance(owner, ast.Call) else owner.value
            name = owner.id if isinstance(owner, ast.Name) else ""
            own = isinstance(node.value, ast.Name) and name in ("self", "cls")
            if not own and name not in ("os", "torch", "super"):
                yield node.lineno


def test_tests_use_private_members_through_doors_only() -> None:
    found = {
        str(path.relative_to(TESTS)): count
        for path in sorted(TESTS.rglob("*.py"))
        if path.name != "doors.py" and (count := len(list(private_accesses(path))))
    }
    assert sum(found.values()) <= PRIVATE_ACCESSES, found


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("a._b", 1),
        ("self._b", 0),
        ("super()._b()", 0),
        ("self.a._b", 1),
        ("os._exit(0)", 0),
        ("a.__class__", 0),
        ("a.b._c = a._d", 2),
    ],
)
def test_private_accesses_are_counted(line: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(line)
    assert len(list(private_accesses(tmp_path / "x.py"))) == count
