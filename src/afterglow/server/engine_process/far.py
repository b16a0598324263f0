"""Objects of another process, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

MakeCall = Callable[[str, Sequence[Any], Mapping[str, Any]], Any]

_here: dict[str, object] = {}


def offer(name: str, value: object) -> None:
    """Let the other process use an object of this one under a name."""
    _here[name] = value


def withdraw(name: str) -> object:
    """Take an offer back, and return the object."""
    return _here.pop(name)


def here(path: str) -> Any:
    """Find an object that this process offers, or an attribute of one."""
    name, *rest = path.split(".")
    return reduce(getattr, rest, _here[name])


class Far:
    """Stands for an object that the other process offers: its attributes are such objects too, and calls are made there.

    A call may be an argument of another one: in the other process it is the object itself.
    """

    def __init__(self, call: MakeCall, path: str, **known: Any) -> None:
        """`call` makes a call there. `known`: attributes that are constants."""
        self._call, self._path = call, path
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Far:
        if name.startswith("__"):
            raise AttributeError(name)
        return Far(self._call, f"{self._path}.{name}")

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._call(self._path, args, named)

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return here, (self._path,)
