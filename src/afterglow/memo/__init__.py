"""AttnCache: attention maps of earlier sentences, used for sentences that attend alike. Prefill and embeddings only.

A hit computes neither queries nor keys, so it leaves nothing that a decode could go on from and nothing that may be
stored as KV: what runs through this room never meets the engine's caches.
"""
