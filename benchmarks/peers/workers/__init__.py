"""One program for each engine; each runs in that engine's own environment."""
