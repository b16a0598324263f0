"""Models that embed texts, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from afterglow.config import EngineConfig
from afterglow.library.locate import find_embedding_model
from afterglow.library.threads import set_up_threads
from afterglow.memo.options import DEFAULT_THRESHOLD, MemoMode
from afterglow.text import Tokenizer

if TYPE_CHECKING:
    from afterglow.engine.kv_format import Progress
    from afterglow.memo.texts import TextEmbedder


def load_embedder(
    model: str | Path | None = None,
    config: EngineConfig | None = None,
    *,
    name: str | None = None,
    tokenizer: Tokenizer | None = None,
    template: str | None = None,
    memo: Path | None = None,
    threshold: float = DEFAULT_THRESHOLD,
    memo_mode: MemoMode = "auto",
    max_tokens: int | None = None,
    progress: Progress | None = None,
) -> TextEmbedder:
    """Load a model for embeddings alone: an encoder of BERT's family, or any model that generates.

    `model` is a Hugging Face directory or the name of a model that was downloaded before; None is the encoder
    `all-minilm-l6-v2`, which is installed apart. `template`, `memo`, `threshold`, `memo_mode` and `max_tokens`: see
    `memo.texts.text_embedder`. `progress` is called with a stage, and with its bytes done and in total.
    Raises: ModelError, ConfigError.
    """
    config = config or EngineConfig()
    folder, found_name = find_embedding_model(model)
    set_up_threads(config.threads)
    from afterglow.engine.hardware import choose_device, use_threads
    from afterglow.memo.texts import load_embedding_model, text_embedder

    use_threads(config.threads)
    tokenizer = tokenizer or Tokenizer(folder)
    loaded = load_embedding_model(
        folder,
        dtype=config.dtype,
        device=str(choose_device(config.device)),
        quantization=config.quantization,
        progress=(lambda done, total: progress("weights", done, total)) if progress is not None else None,
    )
    return text_embedder(
        loaded,
        folder,
        tokenizer,
        name or found_name,
        template=template,
        memo=memo,
        threshold=threshold,
        memo_mode=memo_mode,
        max_tokens=max_tokens,
    )
