"""`afterglow embed`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from errno import EACCES, EISDIR, ENOENT, ENOTDIR
from pathlib import Path
from typing import TYPE_CHECKING

from afterglow.cli.command_options import EmbedConfig
from afterglow.cli.terminal import full_lines, progress, read_text
from afterglow.config import EngineConfig
from afterglow.errors import ConfigError, RequestError
from afterglow.library.embedder import load_embedder
from afterglow.library.locate import ENCODER_ADVICE, PACKAGED, find_embedding_model, find_model, model_name
from afterglow.library.threads import set_up_threads
from afterglow.text.tokenizer import valid

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 256  # texts embedded before their lines are printed


def embed(options: EmbedConfig, config: EngineConfig) -> int:
    """Print a JSON line for each text, or write all vectors to a file. Returns the exit code. Raises: UserError."""
    given = _texts(options.texts, options.file)
    _check_before(options)
    folder, name = _model(options.model, options.memo)
    set_up_threads(config.threads)
    import torch

    with progress() as report:
        embedder = load_embedder(
            folder,
            config,
            name=name,
            template=options.template,
            memo=options.memo,
            threshold=options.threshold,
            memo_mode=options.memo_mode,
            progress=report,
        )
    most, dimensions = embedder.embedder.dimensions, options.dimensions
    if dimensions is not None and not 1 <= dimensions <= most:
        raise ConfigError(
            f"--dimensions must be between 1 and {most}, the size of {name}'s embeddings, got {dimensions}"
        )
    ids = []
    for number, text in enumerate(given, 1):
        sequence = embedder.tokens(text, embedder.embedder.max_tokens if options.truncate else None)
        try:
            embedder.embedder.check(sequence)
        except RequestError as error:
            if error.code != "context_length_exceeded":
                raise
            raise ConfigError(
                f"text {number} has {len(sequence)} tokens, and {name} embeds at most {embedder.embedder.max_tokens} at "
                "once; split it, or let --truncate cut it off"
            ) from None
        ids.append(sequence)
    found, hits, tokens = [], 0, 0
    for start in range(0, len(given), CHUNK):
        result = embedder.embedder.embed(ids[start : start + CHUNK])
        vectors = result.vectors
        if dimensions is not None:
            vectors = torch.nn.functional.normalize(vectors[:, :dimensions], dim=-1)
        hits, tokens = hits + result.memo_hits, tokens + result.tokens
        if options.out is not None:
            found.append(vectors)
            continue
        for offset, (vector, hit) in enumerate(zip(vectors.tolist(), result.hits, strict=True)):
            _print(
                start + offset, given[start + offset], len(ids[start + offset]), vector, hit if options.memo else None
            )
    if options.out is not None:
        _save(options.out, torch.cat(found))
    if sys.stderr.isatty():
        said = f", {hits} with attention from the memo" if options.memo else ""
        print(f"[{len(given)} texts, {tokens} tokens{said}]", file=sys.stderr)
    return 0


def _model(model: str | None, memo: Path | None) -> tuple[Path, str]:
    """Find the folder and the name of the model. The default is that of a server; with a memo it is the
    model that memos are made of by default."""
    if model is not None or memo is not None:
        return find_embedding_model(model)
    folder = find_model(None)
    if sys.stderr.isatty():
        print(
            f"[embedding with {model_name(None, folder)}, as the server does; for vectors that tell more use an encoder: "
            f"{ENCODER_ADVICE}, then --model {PACKAGED}]",
            file=sys.stderr,
        )
    return folder, model_name(None, folder)


def _check_before(options: EmbedConfig) -> None:
    """Check what would only be found out after all the work. Raises: ConfigError."""
    if options.dimensions is not None and options.dimensions < 1:
        raise ConfigError(f"--dimensions must be 1 or more, got {options.dimensions}")
    if options.out is None:
        return
    out, folder = options.out, options.out.parent
    try:
        why = ENOENT if not folder.exists() else ENOTDIR if not folder.is_dir() else EISDIR if out.is_dir() else 0
        if not why and not os.access(out if out.exists() else folder, os.W_OK):
            why = EACCES
    except OSError as error:  # a folder that may not be entered, a name that is too long
        why = error.errno or EACCES
    if why:
        raise ConfigError(f"--out {out} cannot be written: {os.strerror(why)}")


def _texts(texts: Sequence[str], file: Path | None) -> list[str]:
    if texts and file is not None:
        raise ConfigError("give texts or --file, not both")
    found = [valid(text) for text in texts] or full_lines(
        read_text(file, "Texts to embed, one in a line; Ctrl-D ends them:")
    )
    if not found:
        raise ConfigError("there is nothing to embed; give texts, or a file with one text in a line")
    if "" in found:
        raise ConfigError(f"text {found.index('') + 1} is empty: there is nothing to embed; leave it out")
    return found


def _print(index: int, text: str, tokens: int, vector: list[float], hit: bool | None) -> None:
    line = {"index": index, "text": text, "tokens": tokens, **({} if hit is None else {"memo_hit": hit})}
    print(json.dumps({**line, "embedding": [round(value, 8) for value in vector]}, ensure_ascii=False), flush=True)


def _save(out: Path, vectors: Tensor) -> None:
    import numpy as np

    try:
        with out.open("wb") as file:  # numpy would add an ending to a bare name
            np.save(file, vectors.numpy())
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from None
