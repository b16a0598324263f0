"""Rights of callers: API keys, and web pages in browsers."""
