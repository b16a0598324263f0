"""The values that an option with a fixed choice can have. Imports nothing: the plan names these types too."""

from __future__ import annotations

from typing import Literal

PolicyName = Literal["lookahead", "lru", "fifo", "lfu"]
WritePolicy = Literal["write_back", "write_through", "write_through_selective"]
KVSource = Literal["auto", "load", "recompute"]
Preload = Literal["layerwise", "whole"]
ReadBufferForm = Literal["auto", "paper"]
ReadBuffer = int | ReadBufferForm | None
SizeOrAuto = int | Literal["auto"]  # bytes
TruncationPolicy = Literal["oldest", "oldest_tokens", "sinks_and_recent", "importance"]
ImportanceFallback = Literal["per_head", "all"]
ImportanceExact = Literal["idle", "never", "approximate"]
ImportanceRest = Literal["means", "forget"]
ChunkRows = Literal[16, 32, 64, 128, 256]
ToolCallParserName = Literal["auto", "hermes", "llama3_json", "mistral", "qwen3_coder", "openai", "response_template"]
ReasoningParserName = Literal["auto", "none", "think", "mistral", "openai"]
RelayMode = Literal["auto", "on", "off"]
SpeculateMode = Literal["auto", "on", "off"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
KVDtypeName = Literal["auto", "float32", "bfloat16", "float16", "int8"]
QuantizationName = Literal["auto", "none", "int8", "int4", "float8"]
# "blocks": as a quantised file has them. "alone": what the weights are multiplied with is not rounded.
KeptWeights = Literal["none", "int8", "int4", "blocks", "int8 alone", "int4 alone", "float8 alone", "blocks alone"]
