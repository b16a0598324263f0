"""`afterglow serve`, and what a server serves: a model that was found, and the parts that are loaded from it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from afterglow.cli.terminal import progress
from afterglow.config import PINNED, EngineConfig
from afterglow.errors import AfterglowError, ConfigError, ModelError, UserError
from afterglow.library.embedder import load_embedder
from afterglow.library.locate import ABOUT_BUNDLED, BUNDLED, find_embedding_model, find_model, model_name
from afterglow.library.threads import set_up_threads
from afterglow.server.server_config import ServerConfig

if TYPE_CHECKING:
    from afterglow.engine.engine import Engine
    from afterglow.memo.texts import TextEmbedder
    from afterglow.server.bridge import EngineLike
    from afterglow.text import Tokenizer

log = logging.getLogger("afterglow.server")


@dataclass(frozen=True)
class FoundModel:
    """A model's folder and name, and the settings to serve it with."""

    folder: Path
    name: str
    server: ServerConfig
    config: EngineConfig


@dataclass(frozen=True)
class LoadedParts:
    """An engine that runs, its tokenizer, and the models of `/v1/embeddings`, the default first. `kill`: ends another process that
    they are in."""

    engine: EngineLike
    tokenizer: Tokenizer
    embedders: Sequence[TextEmbedder]
    kill: Callable[[], None] | None = None


def serve(model: str | None, server: ServerConfig, config: EngineConfig) -> int:
    """Serve a model until a signal; return the exit code, 1 where the engine stopped before. Raises: UserError, also if the address is
    in use."""
    found = find_served(model, server, config)
    server = found.server
    set_up_threads(config.threads)
    from afterglow.server.lifecycle.address import server_context
    from afterglow.server.lifecycle.connections import connection_limit
    from afterglow.server.lifecycle.service import Service, listen, set_up_logging
    from afterglow.server.metrics.trace_recorder import open_for_appending
    from afterglow.server.server_config import read_prompt

    set_up_logging(server.log_level)
    if model is None and found.name == BUNDLED:
        log.info("%s", ABOUT_BUNDLED)
    # Mistakes in these should not take minutes to find out.
    connection_limit(server.max_connections)
    server_context(server)
    if server.system_prompt_file is not None:
        read_prompt(server.system_prompt_file)
    with closing(listen(server)) as sock:  # before the model is loaded: that may take minutes
        if server.record_trace is not None:
            os.close(open_for_appending(server.record_trace))
        with loaded(found) as parts:
            Service(parts.engine, parts.tokenizer, server, found.folder, sock, parts.embedders, parts.kill).run()
            lived = parts.engine.healthy
    return 0 if lived else 1


def find_served(model: str | None, server: ServerConfig, config: EngineConfig) -> FoundModel:
    """Find a model, and settle what depends on it: its name in the API, and each tenant's part. Raises: UserError."""
    if config.cache.tenant_pins is None and server.api_key:
        tenants = len({*server.api_key, *([server.admin_key] if server.admin_key else [])})
        config = replace(config, cache=replace(config.cache, tenant_pins=PINNED / tenants))
    folder = find_model(model)
    name = model_name(model, folder)
    if not server.served_model_name:
        server = replace(server, served_model_name=(name,))
    return FoundModel(folder, name, server, config)


@contextmanager
def loaded(found: FoundModel) -> Iterator[LoadedParts]:
    """Load the models and start the engine, in this process or in another; at the end the engine writes its cache to disk.

    Raises: UserError.
    """
    from afterglow.text import Tokenizer

    tokenizer = Tokenizer(found.folder)
    if not _apart(found):
        with load_here(found, tokenizer) as parts:
            yield parts
        return
    from afterglow.server.engine_process.client import EngineProcess

    tokenizers = {found.server.served_model_name[0]: tokenizer}
    if found.server.embedding_model is not None:
        folder, name = _find_beside(found.server.embedding_model)
        tokenizers[name] = Tokenizer(folder)
    engine = EngineProcess("afterglow.cli.engine_main", found)
    try:
        yield LoadedParts(engine, tokenizer, engine.embedders(tokenizers), engine.kill)
    except BaseException:
        try:
            engine.close()
        except AfterglowError as error:  # the one that is on its way says why the server ends
            log.error("%s", error)
        raise
    engine.close()


def _apart(found: FoundModel) -> bool:
    """Decide whether the engine has a process of its own. A model that only embeds has no engine. Raises: ConfigError."""
    if found.server.engine_process == "off":
        return False
    from afterglow.engine.hardware import choose_device
    from afterglow.model.loader import is_encoder

    wanted = found.server.engine_process == "on" or choose_device(found.config.device).type == "cuda"
    return wanted and not is_encoder(found.folder)


@contextmanager
def load_here(found: FoundModel, tokenizer: Tokenizer) -> Iterator[LoadedParts]:
    """Load the models and start the engine in this process. Raises: UserError."""
    from afterglow.model.loader import is_encoder

    folder, server, config = found.folder, found.server, found.config
    if is_encoder(folder):
        from afterglow.server.embedding_models import EncoderOnly

        only = _encoder(folder, tokenizer, server, config)
        yield LoadedParts(EncoderOnly(only, config), tokenizer, [only])
        return
    beside = _beside(server, config)
    from afterglow.engine.engine import Engine

    with progress() as report:
        engine = Engine.load(folder, config, report, name=found.name)
    engine.start()
    try:
        yield LoadedParts(engine, tokenizer, [*beside, *_own(engine, folder, tokenizer, server)])
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
    folder, name = _find_beside(server.embedding_model)
    if name in server.served_model_name:
        raise ConfigError(f"--embedding-model is called {name!r}, and so is the other model; use --served-model-name")
    return [_load(folder, name, server, config)]


def _find_beside(model: str) -> tuple[Path, str]:
    """Find the model of --embedding-model. Raises: ModelError, which names the option: the other model has none."""
    try:
        return find_embedding_model(model)
    except ModelError as error:
        raise ModelError(f"--embedding-model: {error}") from None


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
