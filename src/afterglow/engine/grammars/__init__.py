"""Constrained decoding: which tokens may come next in a reply that must follow a grammar."""
