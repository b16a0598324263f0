"""The parts of `benchmarks/truncation.py`: contexts without an engine, the texts, and paired statistics."""
