"""What the programs share: engines in temporary folders, timed turns, texts, statistics."""
