"""Writes a GGUF file in another format with llama.cpp's own `llama_model_quantize`. Runs in llama.cpp's environment.

    python -m benchmarks.peers.workers.quantize_llama SOURCE.gguf FORMAT OUT.gguf

FORMAT is one of `FORMATS`; F32 dequantises. Which tensors of a "Q4_K_M" file get which block format is llama.cpp's choice.
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp as ll

FORMATS = {
    "F32": ll.LLAMA_FTYPE_ALL_F32,
    "Q4_0": ll.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": ll.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q8_0": ll.LLAMA_FTYPE_MOSTLY_Q8_0,
}


def main(source: str, wanted: str, target: str) -> None:
    ll.llama_backend_init()
    params = ll.llama_model_quantize_default_params()
    params.ftype = FORMATS[wanted]
    params.allow_requantize = True
    if status := ll.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama_model_quantize answers {status} for {source} as {wanted}")


if __name__ == "__main__":
    main(*sys.argv[1:])
