"""Options from a file (`--config`) and from variables (`AFTERGLOW_...`).

A key of the file, or a variable, is an option's name. A table of the file that is named after a command, or a variable
that begins with the command's name (`AFTERGLOW_SERVE_PORT`), is for that command alone and goes before. Values are read as
the command line reads them. An option on the command line goes before a variable, a variable before the file.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from afterglow.errors import ConfigError

NAMES = "AFTERGLOW_"
# Variables with other purposes: of the benchmarks and tests, and those that Kubernetes sets for a service of that name.
_OTHERS = re.compile(
    r"CONFIG|DATA|KERNELS|PEERS|BENCH_DIR|WRITE_(API|DOCS)|SERVICE_(HOST|PORT)\w*|PORT_\d+_(TCP|UDP)\w*"
)
_UNSET = ("", "null", "~")  # in a file; a variable is unset where it is empty
_OVERRULE = "the command line goes before it"


@dataclass(frozen=True, slots=True)
class OptionSource:
    """The place of a value: `where` names it in a message, `remedy` says how to overrule it."""

    where: str
    remedy: str


_Found = tuple[str | list[str], OptionSource]


@dataclass(frozen=True, slots=True)
class Given:
    """The parameters that were given: `typed` on the command line, `sources` in a file or in a variable."""

    typed: frozenset[str]
    sources: Mapping[str, OptionSource]

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all parameters that were given."""
        return self.typed | self.sources.keys()

    def source(self, name: str) -> OptionSource | None:
        """Return the place of a parameter's value, or None if it was typed or is the default."""
        return None if name in self.typed else self.sources.get(name)

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Refuse options of the command line that do nothing. Files and variables may be for several commands.

        Raises: ConfigError.
        """
        for name in sorted(self.typed.intersection(names)):
            raise ConfigError(f"--{name.replace('_', '-')} does nothing {why}")

    def named(self, message: str) -> str:
        """Replace options in a message by the variables and keys of the file that gave their values."""

        def name(found: re.Match[str]) -> str:
            source = self.source(found[1].replace("-", "_"))
            return source.where if source is not None else found[0]

        return re.sub(r"--([a-z][a-z-]*[a-z])", name, message)


def given_in(context: Any) -> Given:
    """Collect the parameters that were given to the command of a context."""
    kinds = {p.name: context.get_parameter_source(p.name) for p in context.command.params if p.name != "config"}
    typed = frozenset(name for name, kind in kinds.items() if kind is not None and kind.name == "COMMANDLINE")
    return Given(typed, context.meta.get(NAMES, {}))


def read_sources(context: typer.Context, path: str | None) -> str | None:
    """Take a command's options from the file at `path`, if any, and from variables, as its defaults.

    Raises: ConfigError, for a file that cannot be read, and for keys, variables and values that fit no option.
    """
    if context.resilient_parsing:
        return path
    found = _found(context, path, context.command_path.split()[1])
    values: dict[str, str | list[str]] = {}
    for parameter in context.command.params:
        if parameter.name not in found:
            continue
        value, source = found[parameter.name]
        several = getattr(parameter, "multiple", False) or parameter.nargs == -1
        if several and isinstance(value, str):
            value = _listed(value, source)
        elif not several and isinstance(value, list):
            raise ConfigError(f"{source.where} must be one value, not a list; {source.remedy}")
        if value == [] and str(parameter.name).endswith("_key"):  # a mistake must not leave a server open
            raise ConfigError(f"{source.where} is an empty list; give a key, or leave it out")
        values[parameter.name] = value
    context.default_map = values
    context.meta[NAMES] = {name: found[name][1] for name in values}
    return path


def sources_of(context: typer.Context, path: str | None, command: str) -> dict[str, OptionSource]:
    """Tell where a command that this one starts will find its options, by their names. Raises: ConfigError, as `read_sources`."""
    return {name: source for name, (_, source) in _found(context, path, command).items()}


def _found(context: typer.Context, path: str | None, command: str) -> dict[str, _Found]:
    known = options_by_command(context.find_root().command)
    return (_from_file(path, command, known) if path is not None else {}) | _from_variables(command, known)


def options_by_command(group: Any) -> dict[str, set[str]]:
    """Map the names of commands and groups to the names of their parameters; a group has the parameters of its
    commands."""
    known = {}
    for name, command in group.commands.items():
        inner = options_by_command(command).values() if hasattr(command, "commands") else ()
        known[name] = {p.name for p in command.params}.union(*inner) - {"help", "config"}
    return known


def _from_file(path: str, command: str, known: Mapping[str, set[str]]) -> dict[str, _Found]:
    """Read the options for `command`, and check that every key of the file is one of some command."""
    tables = _load(path)
    own = {key: value for key, value in tables.items() if isinstance(value, dict) and key in known}
    found: dict[str, _Found] = {}
    for table, values in ((None, {k: v for k, v in tables.items() if k not in own}), *own.items()):
        allowed = set().union(*known.values()) if table is None else known[table]
        for key, value in values.items():
            name = key.replace("-", "_")
            where = f"{key if table is None else f'{table}.{key}'} in {path}"
            if name not in allowed:
                raise ConfigError(f"{where} is no option{_nearest(name, allowed)}")
            if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict | list) for v in value)):
                raise ConfigError(f"{where} must be a value or a list of values")
            if table not in (None, command):
                continue
            if value in _UNSET and not _is_empty_key(name, value):
                found.pop(name, None)
                continue
            remedy = f"a table `{command}` in the file can have another" if table is None else _OVERRULE
            written = [*map(_text, value)] if isinstance(value, list) else _text(value)
            found[name] = (written, OptionSource(where, remedy))
    return found


def _from_variables(command: str, known: Mapping[str, set[str]]) -> dict[str, _Found]:
    """Read the options for `command`, and check that every variable is an option of some command."""
    everything = set().union(*known.values())
    found: dict[str, _Found] = {}
    own: dict[str, _Found] = {}
    for variable, value in sorted(os.environ.items()):
        if not variable.startswith(NAMES) or _OTHERS.fullmatch(variable, len(NAMES)):
            continue
        name = variable.removeprefix(NAMES).lower()
        if not value and not _is_empty_key(name, value):
            continue
        table = next((c for c in known if name.startswith(f"{c}_") and name[len(c) + 1 :] in known[c]), None)
        if table is None and name not in everything:
            raise ConfigError(
                f"the variable {variable} is no option{_nearest(name, everything, lambda near: NAMES + near.upper())}"
            )
        if table == command:
            own[name[len(command) + 1 :]] = (value, OptionSource(variable, _OVERRULE))
        elif name in everything:
            remedy = f"{NAMES}{command.upper()}_{name.upper()} is for `{command}` alone"
            found[name] = (value, OptionSource(variable, remedy))
    return found | own


def _is_empty_key(name: str, value: Any) -> bool:
    """Tell whether a value is an empty key: one that is empty by mistake must not leave a server open."""
    return value == "" and name.endswith("_key")


def _listed(value: str, source: OptionSource) -> list[str]:
    """Read the values of an option that may be given several times: JSON if it looks like a list, else one value."""
    if not value.startswith("["):
        return [value]
    with contextlib.suppress(ValueError):
        found = json.loads(value)
        if all(isinstance(each, str | int | float) for each in found):
            return [*map(str, found)]
    raise ConfigError(f'{source.where} must be one value, or a list in JSON such as ["a", "b"]')


def _text(value: Any) -> str:
    """Write a value as on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _nearest(name: str, allowed: Iterable[str], write: Callable[[str], str] = str) -> str:
    near = difflib.get_close_matches(name, sorted(allowed), 2)
    return f"; did you mean {' or '.join(map(write, near))}?" if near else "; afterglow COMMAND --help lists them"


def _load(path: str) -> dict[str, Any]:
    """Read a YAML or TOML file. Raises: ConfigError."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--config {path} cannot be read: {reason}") from None
    if path.endswith(".toml"):
        import tomllib

        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"--config {path} is not valid TOML: {error}") from None
    if not path.endswith((".yaml", ".yml")):
        raise ConfigError(f"--config {path} must be named .yaml, .yml or .toml")
    import yaml

    try:
        found = yaml.load(text, yaml.BaseLoader)  # without types: `relay: off` is a word, as on the command line
    except yaml.YAMLError as error:  # the file's own text may hold keys, and is not shown
        line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
        wordless = isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError)
        problem = f": {error.problem}" if wordless else ""
        raise ConfigError(f"--config {path} is not valid YAML{problem}, line {line}") from None
    if found is not None and not (isinstance(found, dict) and all(isinstance(key, str) for key in found)):
        raise ConfigError(f"--config {path} must have a line such as `host_cache: 8G` for each option")
    return found or {}
