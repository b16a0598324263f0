"""System prompts that are registered, and what replies leave for the next turn."""
