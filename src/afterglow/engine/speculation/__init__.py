"""Guesses of a reply's next tokens, taken from the request's own text (prompt lookup)."""
