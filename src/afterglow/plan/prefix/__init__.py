"""Which tokens are cached: extents, the radix trees over them, the salts they lie under, and truncation."""
