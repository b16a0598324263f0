"""Check the types of what programs give, so that one wrong field ends one request, and not the engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from numbers import Integral
from typing import NoReturn

from afterglow.errors import RequestError


def need(of: object, kind: type | tuple[type, ...], wanted: str, *names: str) -> None:
    """Check the types of fields, which programs may give as they like. Raises: RequestError."""
    for name in names:
        if not isinstance(value := getattr(of, name), kind):
            refuse(name, wanted, value)


def refuse(name: str, wanted: str, value: object) -> NoReturn:
    """Raises: RequestError, with the beginning of the value."""
    said = repr(value)
    raise RequestError(f"{name} must be {wanted}, got {said[:80]}{'...' * (len(said) > 80)}", param=name)


def packed(ids: Sequence[int]) -> array[int]:
    """Pack token ids as uint32. Raises: RequestError, which names the first that is none."""
    try:
        return array("I", ids)
    except (TypeError, OverflowError):
        bad = next((each for each in ids if not isinstance(each, Integral) or not 0 <= each < 2**32), ids)
        raise RequestError(
            f"token id {bad!r} is outside the vocabulary: ids are whole numbers from 0 on", param="prompt"
        ) from None
