"""Threads that carry moves out, save new rows, and read chunks on request."""
