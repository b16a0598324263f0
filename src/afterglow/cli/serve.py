"""`afterglow serve`."""

from __future__ import annotations

import os
from dataclasses import replace

from afterglow.cli.environment import find_model, model_name, set_up_threads
from afterglow.cli.progress import progress
from afterglow.config import EngineConfig
from afterglow.server.settings import ServerConfig


def serve(model: str | None, server: ServerConfig, config: EngineConfig) -> int:
    """Returns the exit code after an orderly end. Errors: UserError, also if the address cannot be had."""
    if not server.api_key and (key := os.environ.get("AFTERGLOW_API_KEY")):
        server = replace(server, api_key=(key,))
    if server.admin_key is None and (key := os.environ.get("AFTERGLOW_ADMIN_KEY")):
        server = replace(server, admin_key=key)
    folder = find_model(model)
    name = model_name(model, folder.resolve())
    if not server.served_model_name:
        server = replace(server, served_model_name=(name,))
    set_up_threads(config.threads)
    from afterglow.server.launch import Service, listen, set_up_logging
    from afterglow.server.record import open_for_appending
    from afterglow.text import Tokenizer

    set_up_logging(server.log_level)
    sock = listen(server)  # before the model is loaded: that may take minutes
    if server.record_trace is not None:
        os.close(open_for_appending(server.record_trace))
    tokenizer = Tokenizer(folder)
    from afterglow.engine.engine import Engine

    with progress() as report:
        engine = Engine.load(folder, config, report, name=name)
    engine.start()
    try:
        service = Service(engine, tokenizer, server, folder, sock)
        service.run()
    finally:
        engine.close(flush=True)
    return 0
