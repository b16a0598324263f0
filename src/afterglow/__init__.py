"""LLM serving, and a Python library, that never prefills the same token twice.

`load_model` loads a model with its cache; `docs/library.md` has programs. Every name but the version is imported when it
is first used, so that `import afterglow` is quick and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from afterglow.version import __version__

if TYPE_CHECKING:
    from afterglow.config import CacheConfig, EngineConfig
    from afterglow.engine.engine import Engine
    from afterglow.errors import AfterglowError, ConfigError, ModelError, RequestError, UserError
    from afterglow.library.embedder import load_embedder
    from afterglow.library.language_model import LanguageModel, load_model
    from afterglow.library.text_reply import TextReply
    from afterglow.request import Breakpoint, Completion, Grammar, Request, SamplingParams

__all__ = [
    "AfterglowError",
    "Breakpoint",
    "CacheConfig",
    "Completion",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "Grammar",
    "LanguageModel",
    "ModelError",
    "Request",
    "RequestError",
    "SamplingParams",
    "TextReply",
    "UserError",
    "__version__",
    "load_embedder",
    "load_model",
]

_HOME = {
    "AfterglowError": "errors",
    "Breakpoint": "request",
    "CacheConfig": "config",
    "Completion": "request",
    "ConfigError": "errors",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "Grammar": "request",
    "LanguageModel": "library.language_model",
    "ModelError": "errors",
    "Request": "request",
    "RequestError": "errors",
    "SamplingParams": "request",
    "TextReply": "library.text_reply",
    "UserError": "errors",
    "load_embedder": "library.embedder",
    "load_model": "library.language_model",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for. Raises: AttributeError."""
    if name not in _HOME:
        raise AttributeError(f"module 'afterglow' has no attribute {name!r}")
    found: object = getattr(import_module(f"afterglow.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """List the public names, those that have not been imported yet included."""
    return sorted({*globals(), *__all__})
