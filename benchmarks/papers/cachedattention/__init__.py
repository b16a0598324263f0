"""CachedAttention (USENIX ATC'24) and its arXiv version, AttentionStore."""
