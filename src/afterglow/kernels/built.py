"""Load the compiled kernels of `native/`: attention, products of rows with a matrix, and the passes between them.

They are compiled when the package is installed, if there is GCC or clang, for Linux on x86-64. Without them every caller uses
torch. `native/afterglow.h` is the binary interface: C includes it, and cffi reads it here.
"""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import Any

import cffi

log = logging.getLogger("afterglow.kernels")

LIBRARY = "_native.so"  # beside this file, whichever Python it was compiled for: it needs none


class Native:
    """The compiled kernels. `lib` has the functions of `afterglow.h`; `width` is the number of floats in a vector."""

    __slots__ = ("_ffi", "lib", "width")

    def __init__(self, library: Path, header: Path) -> None:
        """Load `library`, whose functions `header` declares.

        Raises: OSError if the file is not a library for this machine; ImportError if it was compiled from another version.
        """
        self._ffi = cffi.FFI()
        self._ffi.cdef(declarations(header.read_text()))
        self.lib: Any = self._ffi.dlopen(str(library))
        try:
            version = self.lib.afterglow_abi_version()
        except AttributeError:
            version = None
        if version != self.lib.AFTERGLOW_ABI_VERSION:
            raise ImportError(
                f"{library} was compiled from another version of the package (interface {version}, needed is "
                f"{self.lib.AFTERGLOW_ABI_VERSION})"
            )
        self.width: int = self.lib.afterglow_width()

    def __str__(self) -> str:
        return f"vectors of {self.width} floats, products {'in' if self.lib.afterglow_bytes() else 'not in'} 8 bits"

    def new(self, kind: str, values: object) -> Any:
        """Return a C value of type `kind`, such as `afterglow_norm *`. Its memory lives as long as the result."""
        return self._ffi.new(kind, values)

    def over(self, kind: str, memory: object) -> Any:
        """Return a C value of type `kind`, such as `afterglow_reading[]`, over memory that has a buffer. It keeps that alive."""
        return self._ffi.from_buffer(kind, memory)

    def address(self, memory: Any) -> int:
        """Return the address of a result of `new`."""
        return int(self._ffi.cast("uintptr_t", memory))


def declarations(header: str) -> str:
    """Return the declarations of the text of `afterglow.h` for cffi, with addresses (as torch gives them) for pointers to numbers."""
    lines = (line for line in header.splitlines() if not line.startswith(("#pragma", "#include")))
    return re.sub(r"(?:const )?(?:void|float|u?int\d+_t) \*", "uintptr_t ", "\n".join(lines))


@functools.cache
def native() -> Native | None:
    """Return the compiled kernels, or None if there are none for this machine. The first call logs which kernels run on CPU."""
    here = Path(__file__).parent
    library = here / LIBRARY
    reason = "the package was installed without them (they need Linux on x86-64, and GCC or clang)"
    if library.exists():
        try:
            found = Native(library, here / "native" / "afterglow.h")
        except (OSError, ImportError) as error:
            reason = f"{error}; install the package again to compile them"
        else:
            if found.width:
                log.info("kernels on CPU: compiled, %s", found)
                return found
            reason = "this processor has no AVX2"
    log.warning("kernels on CPU: torch's operators only, which are slower. No compiled kernels: %s", reason)
    return None
