"""Tensors in, tensors out: attention over a segment, the merge, rotary embedding.

This room knows no model, no request and no cache. It imports torch and cffi, and Triton where that is installed. `native` is C,
compiled when the package is installed, if there is a compiler.
"""
