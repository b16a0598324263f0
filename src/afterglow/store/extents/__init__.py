"""How extents lie in host slots and in files, and how they get from one to the other. Knows no catalog."""
