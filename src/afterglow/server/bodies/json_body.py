"""The base of all request bodies: types of fields, and fields that are refused by name.

Fields that change what a reply means are honoured or refused. Other unknown fields are ignored: clients send plenty of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr
from pydantic_core import PydanticCustomError

from afterglow.errors import RequestError
from afterglow.server.bodies.limits import MAX_CHAT_VALUES, MAX_NAME, check_chars, wrong
from afterglow.server.bodies.tool_fields import ToolUse
from afterglow.text.messages import texts_in

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

NO_TOOLS: Final = ToolUse()
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
}


class JsonBody(BaseModel):
    """The base of all bodies. Fields are small or counted, because a body is pickled from process to process."""

    model_config = ConfigDict(extra="ignore", strict=True)
    most_values: ClassVar[int] = MAX_CHAT_VALUES
    _size: int = PrivateAttr(0)
    _tool_use: ToolUse | None = PrivateAttr(None)  # a default that is an object would be copied for each body

    @property
    def size(self) -> int:
        """Return the work of the messages, the tools and the template's variables, in characters. Known once the body is
        checked."""
        return self._size

    @property
    def tool_use(self) -> ToolUse:
        """Return the tools that the reply may call. Known once the body is checked."""
        return self._tool_use or NO_TOOLS

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


def read_begun(messages: Any, continues: bool | None, generation_prompt: bool | None) -> tuple[Any, bool]:
    """Tell whether the last message is the beginning of the reply: by `continue_final_message`, or by the message's own `prefix`, as
    DeepSeek and Mistral have it, which is taken out of the messages. Raises: RequestError."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, dict) and last.get("prefix") is True:
        continues = True
        messages = [*messages[:-1], {name: value for name, value in last.items() if name != "prefix"}]
    if continues and generation_prompt:
        raise RequestError(
            "add_generation_prompt must be false, or left out, where the last message is to be continued "
            "(continue_final_message, or prefix)",
            param="add_generation_prompt",
        )
    return messages, bool(continues)


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def with_effort(
    effort: str | None, thinking: bool | None, variables: Mapping[str, object] | None
) -> Mapping[str, object] | None:
    """Add to a template's variables how much the model is to think. Templates know an effort, or only a switch, under one of
    two names: no effort switches it off. `variables`, as the request gave them, go before."""
    found: dict[str, object] = {}
    if effort is not None:
        found["reasoning_effort"] = effort
    if effort == "none":
        found |= {"enable_thinking": False, "thinking": False}
    if thinking is not None:
        found |= {"enable_thinking": thinking, "thinking": thinking}
    return {**found, **(variables or {})} or None


def check_effort(effort: object, param: str) -> None:
    """Refuse an effort that has no name. Raises: RequestError."""
    if effort is not None and effort not in EFFORTS:
        raise wrong(param, f"must be one of {', '.join(EFFORTS)}", effort)


def check_variables(variables: Mapping[str, object] | None) -> int:
    """Estimate the work of template variables, in characters. Raises: RequestError, if they are too long, or would replace the
    conversation."""
    name = "chat_template_kwargs"
    taken = {"messages", "add_generation_prompt"} & set(variables or ())
    if taken:
        raise RequestError(f"{name} cannot set {sorted(taken)[0]}", param=name)
    chars = sum(map(len, texts_in(variables))) if variables else 0
    check_chars(chars, name)
    return chars
