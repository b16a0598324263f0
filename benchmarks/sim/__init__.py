"""Measurements of the simulator: its speed, and its predictions beside the engine."""
