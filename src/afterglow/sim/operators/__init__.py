"""Models of single operators, fitted to the figures of the papers they are from; no queue and no policy of the engine is run."""
