"""Models that embed, beside the engine."""
