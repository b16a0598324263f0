"""The version of the distribution `afterglow-llm`."""

__version__ = "0.1.0"
