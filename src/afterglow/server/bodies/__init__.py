"""Request bodies: limits, parsing, checked values."""
