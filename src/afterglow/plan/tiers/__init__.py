"""Where extents lie (device, host, disk), and the moves that change it."""
