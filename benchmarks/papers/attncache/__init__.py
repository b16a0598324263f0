"""AttnCache: attention maps of similar sentences."""
