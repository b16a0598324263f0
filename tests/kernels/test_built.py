"""The compiled kernels: they are found, compiled by GCC and clang alike, and left alone where they do not fit."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors._safetensors_rust as other_library
import torch

from afterglow.kernels import built
from afterglow.kernels.built import LIBRARY, Native, declarations, native

NATIVE = Path(built.__file__).with_name("native")
HEADER = NATIVE / "afterglow.h"
VERSIONS = {20: "d24bdc4e952c4c22"}

needs_kernels = pytest.mark.skipif(native() is None, reason="nothing has been built for this machine")


def plain(header: str) -> str:
    return " ".join(re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL).split())


def test_another_interface_has_another_version() -> None:
    """Raise AFTERGLOW_ABI_VERSION with every change of a declaration, and put the digest of the new ones here."""
    text = HEADER.read_text()
    version = int(re.search(r"#define AFTERGLOW_ABI_VERSION (\d+)", text)[1])  # type: ignore[index]
    digest = hashlib.sha256(plain(text).encode()).hexdigest()[:16]
    assert {version: digest} == VERSIONS


def test_the_header_declares_few_arguments_and_no_version_in_a_name() -> None:
    found = re.findall(r"(\w+)\(([^()]*)\);", plain(HEADER.read_text()))
    assert len(found) == 29
    assert all(arguments.count(",") < 8 for _, arguments in found)
    assert not [name for name, _ in found if re.search(r"\d$", name)]


def test_cffi_reads_addresses_for_pointers_to_numbers() -> None:
    text = declarations("#pragma once\n#include <stdint.h>\nvoid f(const float *x, int64_t *y, const s *z, int n);")
    assert text == "void f(uintptr_t x, uintptr_t y, const s *z, int n);"


@needs_kernels
def test_every_function_that_is_called_is_declared() -> None:
    """Python calls nothing else, and everything that is declared is there."""
    library = native()
    assert library is not None
    declared = set(re.findall(r"(afterglow_\w+)\(", plain(declarations(HEADER.read_text()))))
    source = Path(built.__file__).parents[1]
    called = {
        name for path in source.rglob("*.py") for name in re.findall(r"\.lib\.(afterglow_\w+)\(", path.read_text())
    }
    assert called == declared
    assert all(callable(getattr(library.lib, name)) for name in declared)


# ---- files that do not fit


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package whose kernels are to be found here."""
    shutil.copytree(NATIVE, tmp_path / "native")
    monkeypatch.setattr(built, "__file__", str(tmp_path / "built.py"))
    return tmp_path


def warning(caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO, "afterglow.kernels"):
        assert native.__wrapped__() is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    return record.getMessage()


def test_without_a_library_torch_is_used_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "installed without them" in warning(caplog)


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_file_that_is_no_library_is_left_alone(
    folder: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (folder / LIBRARY).write_bytes(content)
    assert "install the package again" in warning(caplog)


def test_a_library_without_our_functions_is_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As one that was compiled before there was a version."""
    shutil.copy(other_library.__file__, folder / LIBRARY)
    assert "(interface None, needed is" in warning(caplog)


@needs_kernels
def test_a_library_of_another_version_is_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(NATIVE.parent / LIBRARY, folder / LIBRARY)
    header = folder / "native" / HEADER.name
    header.write_text(re.sub(r"(ABI_VERSION) \d+", r"\1 999", header.read_text()))
    assert "needed is 999" in warning(caplog)


@needs_kernels
def test_a_library_that_fits_is_said_to_be_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(NATIVE.parent / LIBRARY, folder / LIBRARY)
    with caplog.at_level(logging.INFO, "afterglow.kernels"):
        assert native.__wrapped__() is not None
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "compiled, vectors of" in record.getMessage()


# ---- compilers


def compiler(name: str) -> list[str]:
    if found := shutil.which(name):
        return [found]
    if name == "clang" and importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    pytest.skip(f"no {name} here")


@needs_kernels
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_both_compilers_compile_it_without_a_warning(name: str, tmp_path: Path) -> None:
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-shared", "-fPIC", "-pthread"]
    output = tmp_path / LIBRARY
    sources = [str(path) for path in sorted(NATIVE.glob("*.c"))]
    command = compiler(name)
    subprocess.run([*command, *flags, "-o", str(output), *sources], check=True)
    ours, theirs = native(), Native(output, HEADER)
    assert ours is not None
    assert theirs.width == ours.width or "ziglang" in command  # zig's runtime does not ask the processor
    x, weight = torch.randn(40, 100), torch.randn(100)
    found = []
    for library in (ours, theirs):
        out = torch.empty(40, 100)
        norm = library.new("afterglow_norm *", (weight.data_ptr(), 100, 1e-5))
        library.lib.afterglow_rms_norm(norm, x.data_ptr(), 100, out.data_ptr(), 40, 2, ours.width)
        found.append(out)
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-6)
