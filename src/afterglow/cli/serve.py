"""`afterglow serve`."""

from __future__ import annotations

import logging
import os
from contextlib import closing

from afterglow.cli.load_served import find_served, loaded
from afterglow.config import EngineConfig
from afterglow.library.locate import ABOUT_BUNDLED, BUNDLED
from afterglow.library.threads import set_up_threads
from afterglow.server.server_config import ServerConfig

log = logging.getLogger("afterglow.server")


def serve(model: str | None, server: ServerConfig, config: EngineConfig) -> int:
    """Serve a model, and return the exit code after an orderly end. Raises: UserError, also if the address is in use."""
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
            Service(parts.engine, parts.tokenizer, server, found.folder, sock, parts.embedders).run()
    return 0
