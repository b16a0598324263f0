"""Start, connections and end of the server's process."""
