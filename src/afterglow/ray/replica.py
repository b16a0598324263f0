"""One replica on Ray Serve: Afterglow's application around an engine of its own."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray import serve

from afterglow.cli.serve import find_served, loaded
from afterglow.config import EngineConfig, default_cache_dir
from afterglow.library.threads import set_up_threads
from afterglow.ray.replica_folder import own_folder
from afterglow.ray.session_router import PLACE
from afterglow.server.server_config import ServerConfig

if TYPE_CHECKING:
    from starlette.applications import Starlette


class ServeReplica:
    """Loads a model when Ray starts it, and answers what Ray's proxies pass on. Ray calls the methods."""

    def __init__(self, model: str | None, server: ServerConfig, config: EngineConfig) -> None:
        self._closing = ExitStack()
        try:
            parent = config.cache.cache_dir or default_cache_dir() / "ray"
            self._folder = self._closing.enter_context(own_folder(parent / serve.get_replica_context().app_name))
            config = replace(config, cache=replace(config.cache, cache_dir=self._folder))
            self._app = self._load(model, server, config)
        except BaseException:
            self._closing.close()
            raise

    def _load(self, model: str | None, server: ServerConfig, config: EngineConfig) -> Starlette:
        os.environ["OMP_NUM_THREADS"] = str(config.threads)  # Ray has written there how many cores the replica has
        set_up_threads(config.threads)
        from afterglow.server.app import create_app
        from afterglow.server.lifecycle.service import set_up_logging
        from afterglow.server.server_config import read_prompt
        from afterglow.server.state import State

        set_up_logging(server.log_level)
        found = find_served(model, server, config)
        prompt = read_prompt(server.system_prompt_file) if server.system_prompt_file is not None else None
        parts = self._closing.enter_context(loaded(found))
        app = create_app(parts.engine, parts.tokenizer, found.server, found.folder, parts.embedders)
        state: State = app.state.afterglow
        state.kept_replies.load()
        if state.models.generates:
            state.system_prompts.start(prompt)
        self._engine = parts.engine
        return app

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._app

    def record_replica_metadata(self) -> dict[str, Any]:
        """Tell routers which folder this replica holds."""
        return {PLACE: f"{socket.gethostname()}:{self._folder}"}

    def check_health(self) -> None:
        """Raise if the engine has died: Ray then starts another replica."""
        if not self._engine.healthy:
            raise RuntimeError("the engine has died; its log says why")

    def __del__(self) -> None:
        """End the engine, which writes its cache to disk. Ray calls this when requests have ended."""
        self._closing.close()
