"""Tool calls in replies: the formats in which models write them, read as the reply arrives."""
