"""Afterglow beside other engines: their environments and processes, the requests they are given, and the figures."""
