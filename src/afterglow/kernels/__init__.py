"""Tensors in, tensors out: attention over a segment, the merge, rotary embedding.

Knows no model, no request and no cache; imports torch only.
"""
