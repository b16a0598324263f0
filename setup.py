"""What `pyproject.toml` cannot say yet: the compiled part. Where it cannot be built, the package does without."""

from setuptools import Extension, setup

NATIVE = "src/afterglow/kernels/native/"

setup(
    ext_modules=[
        Extension(
            "afterglow.kernels._native",
            sources=[
                NATIVE + name
                for name in ("team.c", "segments.c", "matrix.c", "bytes.c", "passes.c", "block.c", "pick.c", "vote.c")
            ],
            depends=[NATIVE + name for name in ("team.h", "functions.h", "vectors.h", "rows.h", "panel.h", "passes.h")],
            extra_compile_args=["-O3", "-pthread", "-Wno-psabi"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
