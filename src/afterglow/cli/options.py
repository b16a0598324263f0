"""Command-line flags from the fields of configuration dataclasses: one truth about names, defaults and
help."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, TypeVar

import typer

from afterglow.config import CacheConfig, EngineConfig, parse_size
from afterglow.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

_PANELS = {
    "ServerConfig": "Server",
    "EngineConfig": "Engine",
    "CacheConfig": "Cache",
    "WorkloadConfig": "Workload",
    "EngineModel": "Model and machine",
    "TierConfig": "Sizes",
    "ClusterConfig": "Several engines",
    "GoalConfig": "Goal",
}


def with_configs(*configs: type) -> Callable[[F], Callable[..., Any]]:
    """Give a command the fields of `configs` as flags. The command takes built instances: a parameter for
    each class but CacheConfig, which travels inside EngineConfig."""

    def decorate(command: F) -> Callable[..., Any]:
        hints = typing.get_type_hints(command, include_extras=True)
        own = [
            p.replace(annotation=hints[p.name])
            for p in inspect.signature(command).parameters.values()
            if hints[p.name] not in configs
        ]
        names = {hints[name]: name for name in hints if hints[name] in configs}

        def run(**values: Any) -> Any:
            built = {config: _take(config, values) for config in configs}
            if EngineConfig in built:
                built[EngineConfig]["cache"] = CacheConfig(**built.pop(CacheConfig))
            made = {names[config]: config(**found) for config, found in built.items()}
            return command(**made, **values)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        parameters += [_parameter(config, name) for config in configs for name in _flag_names(config)]
        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


_WRONG = {
    "int_parsing": "is not a whole number; write it in digits",
    "int_from_float": "is not a whole number; write it in digits",
    "int_parsing_size": "has too many digits",
    "float_parsing": "is not a number",
    "bool_parsing": "is neither true nor false",
}


def usage_line(error: Any) -> str:
    """A mistake in the arguments, as one line that names the value and where to read on."""
    message = str(error.format_message())
    errors = getattr(error.__cause__, "errors", None)
    if errors is not None:  # typer has the value checked by pydantic, and does not say which it was
        first = errors()[0]
        wrong = _WRONG.get(first["type"])
        reason = f"{first['input']!r} {wrong}" if wrong else first["msg"].removeprefix("Value error, ")
        message = f"{message.partition(': ')[0]}: {reason}"
    message = " ".join(message.split()).rstrip(".")
    command = error.ctx.command_path if getattr(error, "ctx", None) is not None else "afterglow"
    return f"{message[:1].lower()}{message[1:]} (see {command} --help)"


def _flag_names(config: type) -> list[str]:
    hints = typing.get_type_hints(config)
    return [f.name for f in fields(config) if not is_dataclass(hints[f.name])]


def _take(config: type, values: dict[str, Any]) -> dict[str, Any]:
    """Moves a config's fields out of `values`; lists become the tuples that frozen settings hold."""
    found = {name: values.pop(name) for name in _flag_names(config)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _parameter(config: type, name: str) -> inspect.Parameter:
    field = next(f for f in fields(config) if f.name == name)
    kind = typing.get_type_hints(config)[name]
    default = field.default
    assert default is not MISSING, f"{config.__name__}.{name} needs a default"
    help = field.metadata["help"]
    flag = "--" + name.replace("_", "-")
    more: dict[str, Any] = {"help": help, "rich_help_panel": _PANELS.get(config.__name__)}
    if kind is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    elif kind is int and help.startswith("Bytes"):
        more |= {"parser": _size, "metavar": "SIZE"}
        kind, default = str, _written(default)
    elif typing.get_origin(kind) is tuple:
        kind, default = list[str], []
        more["metavar"] = "TEXT"
    elif typing.get_origin(kind) is typing.Literal:
        choices = ", ".join(typing.get_args(kind))
        more |= {"metavar": "CHOICE", "help": help if choices in help else f"{help} One of {choices}."}
    if default is None or default == [] or default == "":
        more["show_default"] = False
    if isinstance(kind, types.UnionType):  # typer shows `int | None` well enough
        more.setdefault("show_default", False)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, typer.Option(flag, **more)],
    )


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def _written(size: int) -> str:
    """A size as one would type it: 2147483648 -> 2G."""
    for unit in "TGMK":
        step = 1024 ** ("KMGT".index(unit) + 1)
        if size and size % step == 0:
            return f"{size // step}{unit}"
    return str(size)
