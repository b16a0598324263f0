"""Tensors in, tensors out: attention over a segment, the merge, rotary embedding.

Knows no model, no request and no cache; imports torch and numpy only, and Triton where it is installed. `native` is C, built when
the package is installed, if it can be.
"""
