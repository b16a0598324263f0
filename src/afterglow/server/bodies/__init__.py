"""Request bodies: limits, parsing, checked values; and the items of responses, which come back in bodies."""
