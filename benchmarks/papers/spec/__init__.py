"""SPEC (IMPRESS): important rows of long prefixes."""
