"""Rows that are kept for longer than a job: named conversations, registered prompts, and the extents found at a restart."""
