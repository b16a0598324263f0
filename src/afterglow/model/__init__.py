"""What a language model is: one decoder for all families, and how a directory becomes one.

Declares the `Attend` seam and calls it; knows no cache, no request and no engine.
"""
