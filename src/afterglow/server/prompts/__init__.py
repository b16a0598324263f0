"""System prompts that are registered."""
