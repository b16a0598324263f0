"""The base of all request bodies: types of fields, and fields that are refused by name.

Fields that change what a reply means are honoured or refused. Other unknown fields are ignored: clients send plenty of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from afterglow.errors import RequestError
from afterglow.server.bodies.limits import MAX_CHAT_VALUES, MAX_NAME

MAX_SESSION_NAME = 256

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # a JSON number may have thousands of digits


def at_most(count: int) -> BeforeValidator:
    """Check a length in characters, elements or members, before all other validation, with one message for the
    field."""

    def check(value: object) -> object:
        if isinstance(value, str | list | dict) and len(value) > count:
            what = "characters" if isinstance(value, str) else "entries"
            raise PydanticCustomError("too_large", f"at most {count} {what} are accepted, got {len(value)}")
        return value

    return BeforeValidator(check)


Name = Annotated[str, at_most(MAX_NAME)]
Unused = Mapping[str, tuple[object, ...]]  # fields that are not supported, with the values that mean "not used"

NOT_SUPPORTED: Unused = {
    "length_penalty": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "guided_json_object": (False,),
    "guided_whitespace_pattern": (),
    "continue_final_message": (False,),
}


class JsonBody(BaseModel):
    """The base of all bodies. Fields are small or counted, because a body is pickled from process to process."""

    model_config = ConfigDict(extra="ignore", strict=True)
    most_values: ClassVar[int] = MAX_CHAT_VALUES

    @classmethod
    def refused(cls) -> Unused:
        """Return the fields that are refused by name, unless they have a value that means "not used"."""
        return NOT_SUPPORTED

    def check(self) -> None:
        """Check what types cannot express; may normalise inputs that come in several forms. Raises: RequestError."""


def check_session(name: str | None) -> None:
    """Refuse names of conversations that are too long or not printable. Raises: RequestError."""
    if name is not None and not (0 < len(name) <= MAX_SESSION_NAME and name.isprintable()):
        raise RequestError(
            f"session_id must be 1 to {MAX_SESSION_NAME} printable characters, got {name[:80]!r}", param="session_id"
        )


def check_variables(variables: Mapping[str, object] | None) -> None:
    """Refuse template variables that would replace the conversation. Raises: RequestError."""
    taken = {"messages", "add_generation_prompt"} & set(variables or ())
    if taken:
        raise RequestError(f"chat_template_kwargs cannot set {sorted(taken)[0]}", param="chat_template_kwargs")
