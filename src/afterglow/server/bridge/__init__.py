"""Between the engine's thread and the event loop; replies that are remembered."""
