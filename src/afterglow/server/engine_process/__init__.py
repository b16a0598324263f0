"""An engine in a process of its own, so that HTTP and text do not wait for the engine's Python code, nor the engine for theirs."""
