"""`afterglow serve`."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from afterglow.cli.progress import progress
from afterglow.config import PINNED, EngineConfig
from afterglow.errors import ConfigError, UserError
from afterglow.library.embedder import load_embedder
from afterglow.library.locate import ABOUT_BUNDLED, BUNDLED, find_embedding_model, find_model, model_name
from afterglow.library.threads import set_up_threads
from afterglow.server.server_config import ServerConfig

if TYPE_CHECKING:
    from socket import socket

    from afterglow.engine.engine import Engine
    from afterglow.memo.texts import TextEmbedder
    from afterglow.text import Tokenizer

log = logging.getLogger("afterglow.server")


def serve(model: str | None, server: ServerConfig, config: EngineConfig) -> int:
    """Serve a model, and return the exit code after an orderly end. Raises: UserError, also if the address is in use."""
    if config.cache.tenant_pins is None and server.api_key:
        tenants = len({*server.api_key, *([server.admin_key] if server.admin_key else [])})
        config = replace(config, cache=replace(config.cache, tenant_pins=PINNED / tenants))
    folder = find_model(model)
    name = model_name(model, folder)
    if not server.served_model_name:
        server = replace(server, served_model_name=(name,))
    set_up_threads(config.threads)
    from afterglow.server.lifecycle.connections import connection_limit
    from afterglow.server.lifecycle.prompt_file import read_prompt
    from afterglow.server.lifecycle.service import listen, set_up_logging
    from afterglow.server.lifecycle.tls import server_context
    from afterglow.server.metrics.trace_recorder import open_for_appending

    set_up_logging(server.log_level)
    if model is None and name == BUNDLED:
        log.info("%s", ABOUT_BUNDLED)
    # Mistakes in these should not take minutes to find out.
    connection_limit(server.max_connections)
    server_context(server)
    if server.system_prompt_file is not None:
        read_prompt(server.system_prompt_file)
    with closing(listen(server)) as sock:  # before the model is loaded: that may take minutes
        if server.record_trace is not None:
            os.close(open_for_appending(server.record_trace))
        _run(folder, name, server, config, sock)
    return 0


def _run(folder: Path, name: str, server: ServerConfig, config: EngineConfig, sock: socket) -> None:
    """Load the models, and serve them until the process is told to end."""
    from afterglow.model.loader import is_encoder
    from afterglow.server.lifecycle.service import Service
    from afterglow.text import Tokenizer

    tokenizer = Tokenizer(folder)

    if is_encoder(folder):
        from afterglow.server.embedding.encoder_only import EncoderOnly

        only = _encoder(folder, tokenizer, server, config)
        Service(EncoderOnly(only, config), tokenizer, server, folder, sock, [only]).run()
        return
    beside = _beside(server, config)
    from afterglow.engine.engine import Engine

    with progress() as report:
        engine = Engine.load(folder, config, report, name=name)
    engine.start()
    try:
        embedders = [*beside, *_own(engine, folder, tokenizer, server)]
        Service(engine, tokenizer, server, folder, sock, embedders).run()
    finally:
        engine.close(flush=True)


def _encoder(folder: Path, tokenizer: Tokenizer, server: ServerConfig, config: EngineConfig) -> TextEmbedder:
    """Load the only model of a server that has no decoder."""
    if server.embedding_model is not None:
        raise ConfigError(
            f"{folder} is an encoder itself, and there is no place for --embedding-model {server.embedding_model} beside "
            "it; start a second server, or serve it beside a model that generates"
        )
    return _load(folder, server.served_model_name[0], server, config, tokenizer, config.max_model_len)


def _beside(server: ServerConfig, config: EngineConfig) -> list[TextEmbedder]:
    """Load the model of --embedding-model before the other: it is the smaller one, and may be a mistake."""
    if server.embedding_model is None:
        return []
    folder, name = find_embedding_model(server.embedding_model)
    if name in server.served_model_name:
        raise ConfigError(f"--embedding-model is called {name!r}, and so is the other model; use --served-model-name")
    return [_load(folder, name, server, config)]


def _load(
    folder: Path,
    name: str,
    server: ServerConfig,
    config: EngineConfig,
    tokenizer: Tokenizer | None = None,
    max_tokens: int | None = None,
) -> TextEmbedder:
    with progress() as report:
        return load_embedder(
            folder,
            config,
            name=name,
            tokenizer=tokenizer,
            template=server.embedding_template,
            memo=server.memo,
            threshold=server.threshold,
            memo_mode=server.memo_mode,
            max_tokens=max_tokens,
            progress=report,
        )


def _own(engine: Engine, folder: Path, tokenizer: Tokenizer, server: ServerConfig) -> list[TextEmbedder]:
    """Make an embedder of the model that generates: with the memo and the template, unless there is another embedder."""
    from afterglow.memo.texts import text_embedder

    first = server.embedding_model is None
    try:
        return [
            text_embedder(
                engine.decoder,
                folder,
                tokenizer,
                server.served_model_name[0],
                template=server.embedding_template if first else None,
                memo=server.memo if first else None,
                threshold=server.threshold,
                memo_mode=server.memo_mode,
                max_tokens=engine.max_model_len,
            )
        ]
    except UserError as error:
        if first and (server.memo is not None or server.embedding_template is not None):
            raise
        log.warning("no embeddings with this model: %s", error)
        return []
