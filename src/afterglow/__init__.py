"""Afterglow: an LLM server, and a library, that keeps attention alive after a turn ends."""

__version__ = "0.1.0"
