"""One model's folder under the cache directory: its description, its locks, and its neighbours."""
