"""Where a server listens, written into the lock file of the cache that it holds: `afterglow cache` asks it there."""

from __future__ import annotations

import json
import logging
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from afterglow.errors import DamageError
from afterglow.store.namespace import LOCK, holder
from afterglow.store.places import open_file, read_file

log = logging.getLogger("afterglow.server")

_ANYWHERE = ("0.0.0.0", "::")


def announce(folder: Path | None, url: str, certificate: str | None = None) -> None:
    """Say in the namespace `folder`, which this process holds, where it listens, and with which certificate (PEM)."""
    if folder is None:
        return
    try:
        fd = open_file(folder / LOCK, os.O_RDWR)  # another descriptor: closing it leaves the lock alone
        with open(fd, "r+b") as file:
            said = json.loads(file.read())
            if said.get("pid") == os.getpid():
                file.seek(0)
                file.write(json.dumps({**said, "url": url, "certificate": certificate}).encode())
                file.truncate()
    except (OSError, DamageError, ValueError, AttributeError) as error:
        log.warning("%s does not say where the server listens: %s", folder / LOCK, error)


def address_of(folder: Path) -> str | None:
    """Where to reach the process that holds a namespace; None if nobody holds it, or no server does, or one that
    only its own machine reaches."""
    held = holder(folder)
    try:
        url = json.loads(read_file(folder / LOCK)).get("url")
    except (OSError, DamageError, ValueError, AttributeError):
        return None
    return reachable(url, held.host) if held is not None and isinstance(url, str) else None


def certificate_of_holder(folder: Path) -> str | None:
    """The certificate (PEM) that the server which holds a namespace has; None without one."""
    try:
        found = json.loads((folder / LOCK).read_bytes()).get("certificate")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def reachable(url: str, machine: str) -> str | None:
    """An address to connect to, from one that a process on `machine` listens on."""
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
