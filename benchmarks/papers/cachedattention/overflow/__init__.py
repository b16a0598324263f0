"""Contexts that overflow their window, without an engine: texts, dialogues and questions after an overflow."""
