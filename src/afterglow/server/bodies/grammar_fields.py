"""Fields that say what a reply must look like, in the forms of OpenAI and of vLLM, as one grammar.

Only forms are checked here. Whether a grammar can be enforced shows when the engine compiles it.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import PrivateAttr

from afterglow.errors import RequestError
from afterglow.request import Grammar, GrammarKind
from afterglow.server.bodies.json_body import JsonBody
from afterglow.server.bodies.limits import unsupported, wrong
from afterglow.text.chat_template import shown
from afterglow.text.messages import read_json

JSON_MODE = '{"type": "object"}'
_KINDS: dict[str, GrammarKind] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
# vLLM's options that change what is enforced, with the values that mean "not used".
_OTHERS = {
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_additional_properties": (False,),
}


class GrammarFields(JsonBody):
    """The fields of vLLM, which all bodies that ask for replies have."""

    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: dict[str, Any] | None = None
    _grammar: Grammar | None = PrivateAttr(None)

    @property
    def grammar(self) -> Grammar | None:
        """What replies must look like; None: nothing is asked for. Known once the body is checked."""
        return self._grammar

    def check(self) -> None:
        found = [
            _of_vllm(name, getattr(self, f"guided_{name}"), f"guided_{name}")
            for name in _KINDS
            if getattr(self, f"guided_{name}") is not None
        ]
        if self.structured_outputs is not None:
            found += _outputs(self.structured_outputs)
        found += self.formats()
        if len(found) > 1:
            names = [each.param for each in found]
            raise RequestError(f"a reply has one form, got {len(found)}: {', '.join(names)}", param=names[1])
        self._grammar = found[0] if found else None

    def formats(self) -> list[Grammar]:
        """Read OpenAI's field, which each endpoint has in a place of its own. Raises: RequestError."""
        return []


def read_format(given: Any, param: str) -> list[Grammar]:
    """Read `response_format`, or `text.format`, whose fields are not in an object of their own. Raises: RequestError."""
    if given is None:
        return []
    if not isinstance(given, dict):
        raise wrong(param, "must be an object", given)
    kind = given.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [Grammar("json_schema", JSON_MODE, param=param)]
    if kind != "json_schema":
        raise wrong(f"{param}.type", "must be 'text', 'json_object' or 'json_schema'", kind)
    if param == "response_format":
        given, param = given.get("json_schema"), f"{param}.json_schema"
        if not isinstance(given, dict):
            raise wrong(param, "must be an object with a schema", given)
    for name, form in (("name", str), ("strict", bool), ("description", str)):
        if not isinstance(given.get(name), form | None):
            wanted = "a string" if form is str else "true or false"
            raise wrong(f"{param}.{name}", f"must be {wanted}", given[name])
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise wrong(f"{param}.schema", "must be a JSON schema", schema)
    return [Grammar("json_schema", json.dumps(schema), param=f"{param}.schema")]


def _outputs(given: dict[str, Any]) -> list[Grammar]:
    """Read vLLM's `structured_outputs`. Raises: RequestError."""
    name = "structured_outputs"
    for other, unused in _OTHERS.items():
        if given.get(other) is not None and given[other] not in unused:
            raise unsupported(f"{name}.{other}")
    compact = given.get("disable_any_whitespace")
    if not isinstance(compact, bool | None):
        param = f"{name}.disable_any_whitespace"
        raise wrong(param, "must be true or false", compact)
    found = [
        _of_vllm(kind, given[kind], f"{name}.{kind}", bool(compact)) for kind in _KINDS if given.get(kind) is not None
    ]
    if given.get("json_object"):
        found.append(Grammar("json_schema", JSON_MODE, bool(compact), f"{name}.json_object"))
    if not found:
        raise RequestError(f"{name} needs one of json, regex, choice, grammar and json_object", param=name)
    return found


def _of_vllm(name: str, given: Any, param: str, compact: bool = False) -> Grammar:
    """Read one of vLLM's kinds: a schema may be an object or a text, choices are a list of texts, the others a text."""
    if name == "choice":
        if not (isinstance(given, list) and given and all(isinstance(each, str) and each for each in given)):
            raise wrong(param, "must be a list of at least one text, none of them empty", given)
        return Grammar("choice", json.dumps(given), param=param)
    if name == "json":
        return Grammar("json_schema", _schema(given, param), compact, param)
    if not isinstance(given, str) or not given:
        raise wrong(param, "must be a text that is not empty", given)
    return Grammar(_KINDS[name], given, compact, param)


def _schema(given: Any, param: str) -> str:
    """Read a schema, an object or a text, as a text that can be read as JSON. Raises: RequestError."""
    if isinstance(given, dict):
        return json.dumps(given)
    found = given
    if isinstance(given, str):
        try:
            found = read_json(given)
        except ValueError as error:
            raise RequestError(f"{param}: {error}", param=param, code="invalid_grammar") from None
        if isinstance(found, dict | bool):
            return given
    said = f"{param} must be a JSON schema, as an object or as text, got {shown(found)}"
    raise RequestError(said, param=param, code="invalid_grammar")
