"""Quantised models as users have them: GGUF files and rounded checkpoints in Afterglow and in llama.cpp, from opening to a restart."""
