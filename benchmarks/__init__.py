"""Programs that measure Afterglow; each runs as `python -m benchmarks.ROOM.PROGRAM` from the root of the checkout."""
