"""Reasoning in replies: what a model wrote for itself, told from the rest of the reply as it arrives."""
