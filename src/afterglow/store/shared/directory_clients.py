"""Clients of a directory's server. Of a cluster they go to the node that has the directory's names: all are on one.

Imported where a directory is opened: the package `redis` is optional.
"""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import MovedError
from redis.retry import Retry


class DirectoryClients:
    """`quick` is for calls that a request waits for, `patient` for copies. Each connects with its first call."""

    def __init__(self, url: str, quick_s: float, patient_s: float) -> None:
        """Take the URL of any node, and the seconds that each kind of call may take."""
        self._url = url
        self._moved = False
        self._seconds = (quick_s, patient_s)
        self._all = [_FollowingClient(self, self._pool(each, {})) for each in self._seconds]
        self.quick: Any
        self.patient: Any
        self.quick, self.patient = self._all

    def follow(self, error: MovedError) -> None:
        """Go to the node that an answer names instead of the one that gave it."""
        self._go({"port": error.port, **({"host": error.host} if error.host else {})})
        self._moved = True

    def return_home(self) -> None:
        """Ask the node of the URL again: another has failed."""
        if self._moved:
            self._moved = False
            self._go({})

    def _go(self, there: dict[str, Any]) -> None:
        for client, seconds in zip(self._all, self._seconds, strict=True):
            before, client.connection_pool = client.connection_pool, self._pool(seconds, there)
            before.disconnect(inuse_connections=False)

    def _pool(self, seconds: float, there: dict[str, Any]) -> Any:
        """Make a pool of connections to the node of the URL, or to another with the same credentials."""
        pool = redis.ConnectionPool.from_url(
            self._url,
            socket_timeout=seconds,
            socket_connect_timeout=seconds,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
            encoding_errors="replace",  # what is no text is no entry of ours
        )
        pool.connection_kwargs.update(there)
        return pool


class _FollowingClient(redis.Redis):
    """A client that makes a call again where an answer sends it to another node. Those of a pipeline fail."""

    def __init__(self, clients: DirectoryClients, pool: Any) -> None:
        super().__init__(connection_pool=pool)
        self.auto_close_connection_pool = True
        self._clients = clients

    def execute_command(self, *args: Any, **options: Any) -> Any:
        call: Any = super().execute_command
        try:
            return call(*args, **options)
        except MovedError as error:
            self._clients.follow(error)
            return call(*args, **options)
