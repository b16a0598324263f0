"""Architectures without a row of their own: they run through their modules of transformers, with our attention and cache."""
