"""Models in GGUF files: the metadata as a configuration, and the tensors as weights."""
