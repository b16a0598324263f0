"""TLS: the server's certificate, and how a client on the same files trusts it."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

from afterglow.errors import ConfigError
from afterglow.server.server_config import ServerConfig

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
