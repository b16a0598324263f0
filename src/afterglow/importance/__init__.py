"""SPEC (extends IMPRESS, FAST 2025): find out which rows of a cached prefix a request needs, layer by layer, and load these.

`select`, `sums`: selection, tensors in and out. `chunk_cache`, `chunk_loader`, `chunk_reads`, `prefix_loader`,
`row_layout`, `speculation`: loading in chunks. Knows views of extents and readers of files; no batches, no threads.
"Rows" are rows of the reused prefix (R in the paper), numbered by their original positions.
"""
