"""Text: what people and models write, to token ids and back. Knows nothing of tensors, HTTP or caches."""

from afterglow.text.chat_template import ChatTemplate
from afterglow.text.detokenizer import IncrementalDecoder, StopStrings
from afterglow.text.messages import flatten_messages
from afterglow.text.reply_memory import ChatPrompt, Reply, ReplyMemory
from afterglow.text.tokenizer import Tokenizer

__all__ = [
    "ChatPrompt",
    "ChatTemplate",
    "IncrementalDecoder",
    "Reply",
    "ReplyMemory",
    "StopStrings",
    "Tokenizer",
    "flatten_messages",
]
