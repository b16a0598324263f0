"""Several engines behind a router, with a store in common or without."""
