"""Language models: one decoder for all families, and the way from a directory to a decoder.

This room declares the `Attend` seam and calls it; it knows no cache, no request and no engine.
"""
