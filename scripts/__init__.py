"""Programs for development: the README generator, the demo, the training of the bundled model."""
