"""What has been built of `native/`, as a library: attention, products of rows with a matrix, and what is between.

It is built when the package is installed, if there is a GCC, and for x86-64; everything else does without.
"""

from __future__ import annotations

import ctypes
import functools
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


@functools.cache
def native() -> ctypes.CDLL | None:
    """The library, if it has been built and this processor can run it."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_native" + suffix)
        if not path.exists():
            continue
        try:
            library = ctypes.CDLL(str(path))
            _declare(library)
        except (OSError, AttributeError):  # built for another machine, or from other sources
            continue
        return library if library.afterglow_width_3() else None
    return None


def _declare(library: ctypes.CDLL) -> None:
    """Errors: AttributeError, where one of the functions is missing."""
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.afterglow_attend_3.argtypes = (
        *(pointer, size, pointer, pointer, size, size, size, ctypes.c_float),
        *(size, pointer, size, pointer, ctypes.c_int, ctypes.c_int),
    )
    library.afterglow_append_3.argtypes = (
        *(pointer, size, pointer, size, size, size),
        *(size, pointer, size, pointer),
    )
    library.afterglow_append_3.restype = None
    library.afterglow_multiply_3.argtypes = (
        *(pointer, size, size, size, pointer, size),
        *(pointer, ctypes.c_int, pointer, ctypes.c_int, ctypes.c_int),
    )
    library.afterglow_multiply_bytes_3.argtypes = (
        *(pointer, size, size, size, pointer, size),
        *(pointer, ctypes.c_int, pointer, ctypes.c_int),
    )
    library.afterglow_column_sums_3.argtypes = (
        *(pointer, size, size, size, size, size),
        *(pointer, size, size, size, pointer, size, size, size),
        *(pointer, ctypes.c_float, pointer, ctypes.c_int, ctypes.c_int),
    )
    library.afterglow_block_3.argtypes = (
        *(pointer, pointer, pointer, size, pointer, size),
        *(ctypes.c_int, ctypes.c_int),
    )
    library.afterglow_rotate_3.argtypes = (
        *(pointer, size, size, pointer, pointer, pointer, size, size),
        *(size, size, size, size, ctypes.c_int, ctypes.c_int),
    )
    library.afterglow_rms_norm_3.argtypes = (
        *(pointer, size, pointer, ctypes.c_float, pointer),
        *(size, size, ctypes.c_int, ctypes.c_int),
    )
    library.afterglow_gated_silu_3.argtypes = (pointer, size, pointer, size, size, ctypes.c_int, ctypes.c_int)
    library.afterglow_round_3.argtypes = (
        *(pointer, size, ctypes.c_int, pointer, pointer),
        *(size, size, ctypes.c_int, ctypes.c_int),
    )
    library.afterglow_pick_3.argtypes = (pointer, pointer, pointer, pointer, size, size, pointer, ctypes.c_int)
    library.afterglow_vote_3.argtypes = (
        *(pointer, size, size, size, size, pointer),
        *(pointer, pointer, pointer, ctypes.c_int),
    )
    library.afterglow_vote_3.restype = size
    for name in ("rotate", "rms_norm", "gated_silu", "round", "pick"):
        getattr(library, f"afterglow_{name}_3").restype = None
