"""SPEC (extends IMPRESS, FAST 2025): which rows of a cached prefix a request needs, layer by layer, before they are loaded.

Pure parts: tensors and numbers in, tensors and numbers out. Knows kernels and models; no extent, file, thread or queue.
"Rows" are those of the reused prefix (R in the paper), numbered by their place in it: their original positions.
"""
