"""How clients find and trust the server: its address and certificate, in the lock file of the cache that it holds, and TLS."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from afterglow.errors import ConfigError, DamageError
from afterglow.server.server_config import ServerConfig
from afterglow.store.namespace.namespace import LOCK, holder
from afterglow.store.places import open_file, read_file

log = logging.getLogger("afterglow.server")

_ANYWHERE = ("0.0.0.0", "::")


def announce(folder: Path | None, **said: str | int | None) -> None:
    """Write more about the process that holds a namespace, this one, into its lock file: `url` and `certificate` (PEM), by which clients
    find a server, or the `pid` of another process that is to be named as the holder."""
    if folder is None:
        return
    try:
        fd = open_file(folder / LOCK, os.O_RDWR)  # another descriptor: closing it keeps the lock
        with open(fd, "r+b") as file:
            known = json.loads(file.read())
            if known.get("pid") == os.getpid():
                file.seek(0)
                file.write(json.dumps({**known, **said}).encode())
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


def asks_proxies(url: str) -> bool:
    """Tell whether a client of a URL may go through the proxies that the environment names: not to this machine, without TLS."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return True
    return parts.scheme == "https" or not (host in ("localhost", "::1") or host.startswith("127."))


_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def server_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Load the configured certificate; None without one. Raises: ConfigError."""
    if config.ssl_certfile is None:
        return None
    certificate, key = config.ssl_certfile, config.ssl_keyfile or config.ssl_certfile
    for flag, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {flag} {path}: {error.strerror}") from None
    if not _certificate(certificate):
        raise ConfigError(f"--ssl-certfile {certificate} holds no certificate; it has to be a PEM file")

    def password() -> str:
        raise ConfigError(f"the key in {key} is encrypted; give a file that holds it without a password")

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"the key in {key} does not belong to the certificate in {certificate}") from None
        hint = "" if config.ssl_keyfile is not None else "; its key may be given with --ssl-keyfile"
        raise ConfigError(f"{certificate} and {key} hold no usable certificate and key (PEM){hint}") from None
    return context


def certificate_of(config: ServerConfig) -> str | None:
    """Return the server's own certificate, as PEM; it is public."""
    return None if config.ssl_certfile is None else _certificate(config.ssl_certfile)


def _certificate(path: Path) -> str | None:
    found = _CERTIFICATE.search(path.read_text("utf-8", "replace"))
    return found.group() if found else None


def client_context(certificate: str) -> ssl.SSLContext:
    """Trust the one server that has this certificate, under any name. Raises: ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    return context


def untrusted(error: Exception) -> str | None:
    """Return advice for a certificate that a client does not trust; None for other errors."""
    if "CERTIFICATE_VERIFY_FAILED" not in str(error):
        return None
    return "its certificate is not trusted; name a file that holds it in the variable SSL_CERT_FILE"
