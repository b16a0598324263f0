"""`import afterglow` offers exactly this. A difference here is a line in CHANGELOG.md."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import afterglow

PINNED = Path(__file__).with_name("public_api.txt")
WRITE = "AFTERGLOW_WRITE_API"


def described() -> Iterator[str]:
    """One line for each public name, field, method and property."""
    for name in afterglow.__all__:
        found = getattr(afterglow, name)
        if inspect.isclass(found):
            bases = ", ".join(base.__name__ for base in found.__bases__ if base is not object)
            yield f"class {name}({bases})" if bases else f"class {name}"
            yield from members(found)
        elif inspect.isfunction(found):
            yield f"def {name}{inspect.signature(found)}"
        else:
            yield f"{name}: {type(found).__name__}"


def members(found: type) -> Iterator[str]:
    if dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            default = "" if required else " = ..." if field.default is dataclasses.MISSING else f" = {field.default!r}"
            yield f"    {field.name}: {field.type}{default}"
    elif not issubclass(found, Exception):
        yield f"    def __init__{inspect.signature(found.__init__)}"  # type: ignore[misc]
    for name, member in vars(found).items():
        if name.startswith("_") or inspect.ismemberdescriptor(member):
            continue
        if isinstance(member, property):
            yield f"    {name}: {member.fget.__annotations__['return']}"
        elif isinstance(member, classmethod):
            yield f"    classmethod {name}{inspect.signature(member.__func__)}"
        elif inspect.isfunction(member):
            yield f"    def {name}{inspect.signature(member)}"


def test_names_and_signatures_are_pinned() -> None:
    now = "\n".join(described()) + "\n"
    if os.environ.get(WRITE):
        PINNED.write_text(now, "utf-8")
    assert now == PINNED.read_text("utf-8"), f"the public API differs; if that is meant: {WRITE}=1 pytest {__file__}"


def test_all_names_are_listed_and_others_are_refused() -> None:
    assert sorted(afterglow.__all__) == afterglow.__all__
    assert set(afterglow.__all__) <= set(dir(afterglow))
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = afterglow.nothing_of_this_name


def test_importing_is_light_until_a_name_is_used() -> None:
    program = (
        "import sys, afterglow; heavy = {'torch', 'numpy', 'tokenizers', 'jinja2', 'afterglow.config'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "from afterglow import EngineConfig, Request, SamplingParams, Completion, load_model, load_embedder, RequestError;"
        "assert 'torch' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_inner_modules_never_import_the_face() -> None:
    """They would import all rooms at once, whatever import-linter says of their own imports."""
    source = Path(afterglow.__file__).parent
    for path in source.rglob("*.py"):
        text = path.read_text("utf-8")
        assert "\nfrom afterglow import " not in text, path
        assert "\nimport afterglow\n" not in text, path
