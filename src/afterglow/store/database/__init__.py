"""The SQLite files of a namespace: the catalog of extents with its notes, and stored conversations."""
