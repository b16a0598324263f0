"""Text in, text out: an engine with its tokenizer, for programs, the command line and the server."""
