"""KV events: which blocks of 64 tokens lie in which tier, published in vLLM's format for routers and indexers.

changes     which extents have changed, noted on the engine's thread
blocks      extents -> blocks with chained hashes; events are what has changed of them
wire        events -> messages (msgpack)
publisher   a thread of its own, with the sockets (ZeroMQ)
"""
