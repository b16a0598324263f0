"""Every error that Afterglow raises on purpose.

AfterglowError
├── UserError                 a mistake of the user: one clear line, no traceback
│   ├── ModelError            a model directory that is missing, damaged or not supported
│   ├── ConfigError           an option with an impossible value, a port in use, a locked cache directory
│   └── RequestError          a request that cannot be served; carries the HTTP status and the parameter
└── StoreError                a tier failed; the store turns it into a miss and a counter
    ├── SlowError             a read was given up, for it has shown that the tier is slow
    ├── RefusedError          a tier was not asked: it has failed a moment ago
    └── DamageError           stored bytes differ from the written ones (checksum, header, length)
"""

from __future__ import annotations


class AfterglowError(Exception):
    """The base of all errors raised on purpose."""


class UserError(AfterglowError):
    """A mistake that the user can mend; the message names the value and the remedy."""


class ModelError(UserError):
    """A model directory that is missing, damaged, or asks for something that is not honoured."""


class ConfigError(UserError):
    """An option whose value is impossible, or a resource that another process holds."""


class RequestError(UserError):
    """A request that cannot be served.

    `status` is the HTTP status (400 by default), `param` the field at fault, `code` OpenAI's error code.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def engine_dead() -> RequestError:
    """Make the error for requests after the engine has failed."""
    return RequestError(
        "the engine has stopped unexpectedly; the server must be restarted", status=503, code="engine_dead"
    )


def shutting_down() -> RequestError:
    """Make the error for requests that come while the engine or the server ends."""
    return RequestError("the server is shutting down", status=503, code="unavailable")


class StoreError(AfterglowError):
    """A tier failed (I/O error, no space, time-out)."""


class SlowError(StoreError):
    """A read that measures a tier has shown that the tier is slow."""


class RefusedError(StoreError):
    """A tier was not asked, because it has failed a moment ago."""


class DamageError(StoreError):
    """Stored bytes differ from the written ones."""
