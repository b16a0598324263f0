"""The compiled kernels: one shared library without Python's ABI, in a wheel for any Python 3.

`AFTERGLOW_KERNELS` says what becomes of them: `auto` (the default) builds them where that works, `required` fails where it
does not, `none` makes a wheel without them, for any machine.
"""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = "src/afterglow/kernels/native/"
KERNELS = os.environ.get("AFTERGLOW_KERNELS", "auto")
if KERNELS not in ("auto", "required", "none"):
    raise SystemExit(f"AFTERGLOW_KERNELS must be auto, required or none, got {KERNELS!r}")


class LibraryBuild(build_ext):
    """Name the library without the tag of a Python version: it is loaded by path, and calls no Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"


class LibraryWheel(bdist_wheel):
    """Tag the wheel `py3-none-PLATFORM`, and `py3-none-any` where it holds no library."""

    def get_tag(self) -> tuple[str, str, str]:
        built = Path(self.bdist_dir, "afterglow/kernels/_native.so").exists() or not Path(self.bdist_dir).exists()
        return "py3", "none", super().get_tag()[2] if built and self.distribution.ext_modules else "any"


setup(
    cmdclass={"build_ext": LibraryBuild, "bdist_wheel": LibraryWheel},
    ext_modules=[]
    if KERNELS == "none"
    else [
        Extension(
            "afterglow.kernels._native",
            sources=[
                NATIVE + name
                for name in (
                    "team.c",
                    "segments.c",
                    "matrix.c",
                    "bytes.c",
                    "fill.c",
                    "round_blocks.c",
                    "packed.c",
                    "packed_blocks.c",
                    "passes.c",
                    "block.c",
                    "layers.c",
                    "experts.c",
                    "pick.c",
                    "vote.c",
                    "stored_maps.c",
                    "read.c",
                )
            ],
            depends=[
                NATIVE + name
                for name in (
                    "team.h",
                    "afterglow.h",
                    "block.h",
                    "vectors.h",
                    "rows.h",
                    "panel.h",
                    "passes.h",
                    "stored_maps.h",
                    "packed.h",
                    "packed_rows.h",
                )
            ],
            extra_compile_args=["-O3", "-g0", "-pthread", "-Wno-psabi"],
            extra_link_args=["-pthread"],
            optional=KERNELS == "auto",
        )
    ],
)
