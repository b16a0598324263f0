"""Parts of `importance_quality.py`."""
