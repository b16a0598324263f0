"""KV events as messages, in the format that vLLM publishes: a batch is a msgpack array, each event in it a map.

[seconds since 1970, [event, ...], 0]                                  0: the data-parallel rank
{"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., "token_ids": [...], "block_size": 64,
 "lora_id": None, "medium": "GPU" | "CPU" | "STORAGE", "lora_name": None, "extra_keys": [...]}
{"type": "BlockRemoved", "block_hashes": [...], "medium": ...}
{"type": "AllBlocksCleared"}
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from afterglow.config import BLOCK_ROWS
from afterglow.engine.kv_events.blocks import KVEvent, RemovedBlocks, StoredBlocks

END = (-1).to_bytes(8, "big", signed=True)  # in the place of a number: the end of a replay


def number_frame(number: int) -> bytes:
    """Write the number of a message as its frame."""
    return number.to_bytes(8, "big")


def encode(events: Sequence[KVEvent], at: float, token_ids: bool) -> bytes:
    """Write a batch. `at`: seconds since 1970. `token_ids`: with the tokens of the blocks; the list is empty without."""
    import msgpack

    packed: bytes = msgpack.packb([at, [_event(event, token_ids) for event in events], 0])
    return packed


def _event(event: KVEvent, token_ids: bool) -> dict[str, Any]:
    if isinstance(event, StoredBlocks):
        written: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": array("I", event.tokens).tolist() if token_ids else [],
            "block_size": BLOCK_ROWS,
            "lora_id": None,
            "medium": event.medium,
            "lora_name": None,
        }
        if event.salt:
            keys = [{"type": "cache_salt", "salt": event.salt}]
            written["extra_keys"] = [keys] + [None] * (len(event.hashes) - 1)
        return written
    if isinstance(event, RemovedBlocks):
        return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": event.medium}
    return {"type": "AllBlocksCleared"}
