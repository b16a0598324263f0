"""The parts of `benchmarks/papers_cachedattention.py`: what the papers print, the runs, and the figures made of them."""
