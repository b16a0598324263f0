"""Afterglow beside other engines: their environments, their processes, what is asked of them, what is made of it."""
