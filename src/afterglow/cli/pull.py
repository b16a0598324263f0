"""`afterglow pull`."""

from __future__ import annotations

from afterglow.errors import ModelError
from afterglow.library.hub import HubModel, download


def pull(model: str) -> int:
    """Download a model from the hub, print its path, and return the exit code. Raises: ModelError."""
    named = HubModel.parse(model)
    if named is None:
        raise ModelError(f"{model!r} names no model on the hub: give OWNER/NAME, or OWNER/NAME:FILE.gguf")
    print(download(named))
    return 0
