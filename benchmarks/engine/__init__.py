"""Measurements of the engine that belong to no paper."""
