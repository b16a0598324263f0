"""The server's address, in the lock file of the cache that it holds: `afterglow cache` finds the server there."""

from __future__ import annotations

import json
import logging
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from afterglow.errors import DamageError
from afterglow.store.namespace.namespace import LOCK, holder
from afterglow.store.places import open_file, read_file

log = logging.getLogger("afterglow.server")

_ANYWHERE = ("0.0.0.0", "::")


def announce(folder: Path | None, url: str, certificate: str | None = None) -> None:
    """Write this server's address and certificate (PEM) into the lock file of the namespace that this process holds."""
    if folder is None:
        return
    try:
        fd = open_file(folder / LOCK, os.O_RDWR)  # another descriptor: closing it keeps the lock
        with open(fd, "r+b") as file:
            said = json.loads(file.read())
            if said.get("pid") == os.getpid():
                file.seek(0)
                file.write(json.dumps({**said, "url": url, "certificate": certificate}).encode())
                file.truncate()
    except (OSError, DamageError, ValueError, AttributeError) as error:
        log.warning("%s does not say where the server listens: %s", folder / LOCK, error)


def address_of(folder: Path) -> str | None:
    """Find the address of the server that holds a namespace. None if no server does, or if it can be reached from its
    own machine only."""
    held = holder(folder)
    try:
        url = json.loads(read_file(folder / LOCK)).get("url")
    except (OSError, DamageError, ValueError, AttributeError):
        return None
    return reachable(url, held.host) if held is not None and isinstance(url, str) else None


def certificate_of_holder(folder: Path) -> str | None:
    """Find the certificate (PEM) of the server that holds a namespace; None without one."""
    try:
        found = json.loads((folder / LOCK).read_bytes()).get("certificate")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def reachable(url: str, machine: str) -> str | None:
    """Turn the address that a process on `machine` listens on into one to connect to; None if there is none."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    here = machine == socket.gethostname()
    if host in _ANYWHERE:
        loopback = "[::1]" if ":" in host else "127.0.0.1"
        return urlunsplit(parts._replace(netloc=f"{loopback if here else machine}:{port}"))
    local = host == "localhost" or host == "::1" or host.startswith("127.")
    return None if local and not here else url
