"""Command-line parameters from the fields of dataclasses: a field's name, type, default and help text are the option's.

A command is a function of dataclasses; `command` registers it with typer. Each field becomes an option, or an argument
where `config.argument` made it; a field that is a dataclass itself contributes its own fields.
"""

from __future__ import annotations

import errno
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from afterglow.choices import ReadBuffer, SizeOrAuto
from afterglow.cli.option_sources import NAMES, Given, given_in, read_sources
from afterglow.cli.terminal import ReaderGone, give_up_output
from afterglow.config import parse_size
from afterglow.errors import ConfigError, UserError

F = TypeVar("F", bound=Callable[..., int])

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

_ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Take options from this YAML or TOML file, such as `host_cache: 8G`. Variables are read too: AFTERGLOW_HOST_CACHE. "
        "The command line goes before variables, and variables before the file.",
        envvar="AFTERGLOW_CONFIG",
        callback=read_sources,
        is_eager=True,
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Only:
    """Names the fields of a config that a command takes: `Annotated[EngineConfig, Only(("threads",))]`."""

    names: tuple[str, ...]


def command(app: typer.Typer, name: str, **settings: Any) -> Callable[[F], F]:
    """Register a function as a command. Its parameters are dataclasses, single options (`Annotated[bool, option(False, "...")]`),
    a `typer.Context` or `Given`; it returns the exit code."""

    def register(run: F) -> F:
        hints = typing.get_type_hints(run, include_extras=True)
        hints.pop("return", None)
        configs = {name: _split(hint) for name, hint in hints.items() if hint not in (typer.Context, Given)}

        def invoke(context: typer.Context, config: str | None, **values: Any) -> None:
            given = given_in(context)
            known: dict[Any, Any] = {typer.Context: context, Given: given}
            try:
                built = {name: _build(name, kind, values) for name, (kind, _) in configs.items()}
                if isinstance(context.obj, _Unrun):
                    context.obj.parsed = Parsed(built, given)
                    return
                code = run(**built, **{name: known[hint] for name, hint in hints.items() if hint in known})
                sys.stdout.flush()
            except BrokenPipeError:
                raise ReaderGone from None
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                give_up_output()
                raise ConfigError("there is no space left where standard output, or a file, is written") from None
            except UserError as error:
                error.args = (given.named(str(error)),)
                raise
            raise typer.Exit(code)

        parameters = [_parameter("context", typer.Context, inspect.Parameter.empty)]
        parameters += [made for name, parts in configs.items() for made in _parameters(name, *parts)]
        parameters.append(_parameter("config", _ConfigFile, None))
        invoke.__doc__ = run.__doc__
        invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        app.command(name, **settings)(invoke)
        return run

    return register


@dataclass(frozen=True)
class Parsed:
    """A command that was read and not run: what its function's parameters would be, by name, and what was given."""

    configs: Mapping[str, Any]
    given: Given


@dataclass
class _Unrun:
    """Asks a command to leave what it has read here, and not to run."""

    parsed: Parsed | None = None


def parse(app: typer.Typer, args: Sequence[str]) -> Parsed:
    """Read a command and its options, as well as variables and `--config`, without running it. Raises: UserError."""
    asked = _Unrun()
    try:
        app([*args], prog_name="afterglow", standalone_mode=False, obj=asked)
    except typer.TyperException as error:
        raise ConfigError(usage_line(error)) from None
    if asked.parsed is None:
        raise ConfigError(f"{' '.join(args)!r} only shows something, and has no settings")
    return asked.parsed


def _split(hint: Any) -> tuple[Any, Only | Field[Any] | None]:
    """Take apart a parameter's type: a dataclass, and which of its fields are wanted, None for all; or a value and its field."""
    if typing.get_origin(hint) is not Annotated:
        return hint, None
    kind, about = typing.get_args(hint)
    return kind, about


def _build(name: str, kind: Any, values: dict[str, Any]) -> Any:
    """Build a config from the values of its options, or one value; lists become tuples, which frozen dataclasses hold."""
    if not is_dataclass(kind):
        value = values[name]
        return tuple(map(_at_home, value)) if isinstance(value, list) else _at_home(value)
    inner = typing.get_type_hints(kind).items()
    made = {each: _build(each, of, values) for each, of in inner if is_dataclass(of) or each in values}
    return kind(**made)  # type: ignore[operator]


def _at_home(value: Any) -> Any:
    """Expand the `~` of a path: a shell leaves that of --option=~/folder, and files and variables know no shell."""
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value


def _parameters(name: str, kind: Any, about: Only | Field[Any] | None = None) -> list[inspect.Parameter]:
    """Make the parameters of a dataclass: its own fields, then inherited ones, then those of dataclasses within it. Fields
    without a help text are no options. Of a value with a field: the one parameter."""
    if isinstance(about, Field):
        return [_from_field(name, about, kind, None)]
    hints = typing.get_type_hints(kind)
    panel = _PANELS.get(kind.__name__)
    if about is not None:
        return [_from_field(f.name, f, hints[f.name], None) for f in fields(kind) if f.name in about.names]
    ordered = sorted(fields(kind), key=lambda field: field.name not in kind.__annotations__)
    own = [_from_field(f.name, f, hints[f.name], panel) for f in ordered if "help" in f.metadata]
    inner = {each: of for each, of in hints.items() if is_dataclass(of)}
    return own + [parameter for each, of in inner.items() for parameter in _parameters(each, of)]


def _from_field(name: str, field: Field[Any], kind: Any, panel: str | None) -> inspect.Parameter:
    about = field.metadata
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    more: dict[str, Any] = {"rich_help_panel": panel, "metavar": about.get("metavar")}
    text: str = about["help"]
    if default in (None, (), "", inspect.Parameter.empty) or isinstance(kind, types.UnionType):
        more["show_default"] = False
    if kind == SizeOrAuto:
        more["parser"], more["metavar"], more["show_default"] = _size_or_auto, "SIZE", True
        kind, default = str, _written(default) if isinstance(default, int) else default
    elif kind == ReadBuffer:
        more["parser"], kind = _layers, str | None
    elif about.get("size"):
        more["parser"] = _size
        more["metavar"] = more["metavar"] or "SIZE"
        kind = str | None if isinstance(kind, types.UnionType) else str
        default = _written(default) if isinstance(default, int) else default
    elif typing.get_origin(kind) is tuple:
        kind = list[typing.get_args(kind)[0]]  # type: ignore[misc]
        default = [] if default == () else default
        more["metavar"] = more["metavar"] or ("TEXT" if kind == list[str] else None)
    elif typing.get_origin(kind) is typing.Literal:
        choices = ", ".join(map(str, typing.get_args(kind)))
        more["metavar"] = "CHOICE"
        text = text if choices in text else f"{text} One of {choices}."
        kind = int if isinstance(default, int) else kind  # the dataclass checks the choice
    more["help"] = text.replace("[", r"\[")  # rich takes brackets for its own markup
    if about.get("argument"):
        more["show_default"] = False
        return _parameter(name, Annotated[kind, typer.Argument(**more)], default)
    flag = "--" + name.replace("_", "-")
    if kind is bool and not about.get("names"):
        flag = f"{flag}/--no-{flag[2:]}"
    return _parameter(name, Annotated[kind, typer.Option(*(about.get("names") or (flag,)), **more)], default)


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


_WRONG = {
    "int_parsing": "is not a whole number; write it in digits",
    "int_from_float": "is not a whole number; write it in digits",
    "int_parsing_size": "has too many digits",
    "float_parsing": "is not a number",
    "bool_parsing": "is neither true nor false",
}


def _as_argument(option: str, context: Any) -> str | None:
    """Say how a value is given that has an option in other programs, and is an argument here."""
    for known in context.command.params:
        if known.param_type_name == "argument" and option == f"--{known.name}":
            return f"no such option: {option}; give its value alone: {context.command_path} {known.metavar}"
    return None


def usage_line(error: Any) -> str:
    """Write a mistake in the arguments as one line that names the value, its source, and where to read on."""
    message = str(error.format_message())
    place, _, reason = message.partition(": ")
    errors = getattr(error.__cause__, "errors", None)
    if errors is not None:  # typer has the value checked by pydantic, and does not say which value was wrong
        first = errors()[0]
        wrong = _WRONG.get(first["type"])
        reason = f"{first['input']!r} {wrong}" if wrong else first["msg"].removeprefix("Value error, ")
        message = f"{place}: {reason}"
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is not None and parameter is not None and (given := given_in(context).source(parameter.name)):
        message = f"{given.where}: {reason.rstrip('.')}; {given.remedy}"
    if context is not None and (advice := _as_argument(getattr(error, "option_name", ""), context)):
        message = advice
    message = " ".join(message.split()).rstrip(".")
    if not message.startswith(NAMES):
        message = f"{message[:1].lower()}{message[1:]}"
    return f"{message} (see {context.command_path if context is not None else 'afterglow'} --help)"


def _size(text: str) -> int:
    """Read a size. Raises: BadParameter."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def _layers(text: str) -> int | str:
    """Read a number of layers, or the name of a formula, which the configuration checks."""
    try:
        return int(text)
    except ValueError:
        return text


def _size_or_auto(text: str) -> int | str:
    """Read a size, or the word auto. Raises: BadParameter."""
    return text if text == "auto" else _size(text)


def _written(size: int) -> str:
    """Write a size as one would type it: 2147483648 -> 2G."""
    for unit in "TGMK":
        step = 1024 ** ("KMGT".index(unit) + 1)
        if size and size % step == 0:
            return f"{size // step}{unit}"
    return str(size)
