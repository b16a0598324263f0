"""Where requests come from: made conversations and recorded traces."""
